"""A CPU rank's compute as the sum of operators that a calibration measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.costmodel.test_calibrated import made, plan
from workbench.costmodel.compute.measured_seams import host_costs
from workbench.costmodel.rates.measured_operators import MeasuredOperators
from workbench.errors import PlanError
from workbench.machine import calibration_file
from workbench.machine.calibration_file import KINDS, Calibration, Collective, Operator, Scale
from workbench.planner import estimate
from workbench.planner.search import search

CALL, MULTIPLICATION, ELEMENT = 1e-5, 1e-11, 1e-9
KINDS_OF_OPERATORS = (
    "rmsnorm",
    "rope",
    "swiglu",
    "head_loss",
    "attention",
    "ring_step",
    "embedding",
)
SIZES = (16, 96, 512)
ULYSSES = {"strategy.context.size": 2, "strategy.context.algorithm": "ulysses"}
COSTS_OF_VERSION_1 = {
    "ranks",
    "operator_us",
    "autograd_us",
    "step_us",
    "microbatch_us",
    "layer_us",
    "layer_step_us",
}


def seconds(kind: str, rows: float, columns: float, inner: float) -> float:
    """A form that every kind of operator is fitted by."""
    if kind in ("linear", "head_loss"):
        return CALL + MULTIPLICATION * rows * columns * inner
    if kind in ("attention", "ring_step"):
        return CALL + MULTIPLICATION * rows * columns**2 * inner
    return CALL + ELEMENT * rows * columns


def operators(slow: float = 1.0, compiled: float = 0.5) -> tuple[Operator, ...]:
    found = []
    for kind in ("linear", *KINDS_OF_OPERATORS):
        matrix = kind in ("linear", "head_loss", "attention", "ring_step")
        for code in ("eager", "compiled") if kind in ("rmsnorm", "rope", "swiglu") else ("eager",):
            for rows, columns, inner in (
                (r, c, i) for r in SIZES for c in SIZES for i in (SIZES if matrix else (1,))
            ):
                one = slow * seconds(kind, rows, columns, inner)
                one *= compiled if code == "compiled" else 1.0
                found.append(
                    Operator(
                        kind=kind,
                        kernels=code,
                        rows=rows,
                        columns=columns,
                        inner=inner,
                        ranks=1,
                        forward=one,
                        backward=2 * one,
                        weight=one if kind == "linear" else 0.0,
                    )
                )
    update = Operator(
        kind="adamw", kernels="eager", rows=1, columns=1, inner=1, ranks=1, forward=1e-6
    )
    return (*found, update, update.model_copy(update={"rows": 2**20, "forward": 1e-3}))


def collectives() -> tuple[Collective, ...]:
    return tuple(
        Collective(kind=k, group=2, ranks=2, dtype="fp32", bytes=b, seconds=1e-3 + 1e-9 * b)
        for k in KINDS
        for b in (256, 2**16, 2**24)
    )


def calibration(**changes: Any) -> Calibration:
    return made(**{"operators": operators(), "collectives": collectives(), **changes})


def kept(tmp_path: Path, found: Calibration) -> Path:
    path = tmp_path / "calibration.yaml"
    calibration_file.write_calibration(found, path)
    return path


@pytest.mark.parametrize("kind", ["linear", "rmsnorm", "attention", "head_loss"])
def test_an_operator_follows_its_form_beyond_what_was_measured(kind: str) -> None:
    o = MeasuredOperators(calibration(), 1, True)
    for shape in ((16, 96, 512), (2048, 4096, 64), (100, 300, 32)):
        inner = shape[2] if kind != "rmsnorm" else 1
        found = o.operator(kind, "eager", *shape[:2], inner)
        assert found.forward == pytest.approx(seconds(kind, *shape[:2], inner), rel=0.02)
        assert found.backward == pytest.approx(2 * seconds(kind, *shape[:2], inner), rel=0.02)


def test_a_measured_shape_is_met_exactly() -> None:
    odd = operators()[0].model_copy(update={"rows": 40, "columns": 40, "inner": 40})
    odd = odd.model_copy(update={"forward": 7e-5})
    o = MeasuredOperators(calibration(operators=(*operators(), odd)), 1, True)
    assert o.operator("linear", "eager", 40, 40, 40).forward == pytest.approx(7e-5, rel=1e-3)


def test_ranks_that_share_cores_take_turns() -> None:
    one, four = (MeasuredOperators(calibration(), ranks, True) for ranks in (1, 4))
    shape = (96, 96, 96)
    assert four.operator("linear", "eager", *shape).forward == pytest.approx(
        2 * one.operator("linear", "eager", *shape).forward
    )


def test_a_layer_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    path = kept(tmp_path, calibration())
    quick = estimate(plan(path, gpus=1, strategy="single")).notes["time"]["compute"]
    slow = calibration(operators=operators(slow=3.0))
    calibration_file.write_calibration(slow, path)
    assert estimate(plan(path, gpus=1, strategy="single")).notes["time"]["compute"] > 2 * quick


def test_compiled_code_counts_where_the_plan_compiles(tmp_path: Path) -> None:
    path = kept(tmp_path, calibration())

    def compute(kernels: str) -> float:
        full = plan(path, gpus=1, strategy="single", **{"strategy.kernels": kernels})
        return float(estimate(full).notes["time"]["compute"])

    assert compute("compiled") < compute("eager")
    assert compute("fused") == pytest.approx(compute("eager")), "tiny seams stay plain on a CPU"


def test_what_the_host_takes_between_operators_is_a_tiny_models_rest() -> None:
    o = MeasuredOperators(calibration(), 1, True)
    attention = o.operator("attention", "eager", 2, 4, 8)
    found = host_costs(o, "eager")
    assert 0 < found.layer < 1e-6 * o.host.layer_us
    assert found.layer_forward == pytest.approx(found.layer / 3, rel=1e-6), "backward is twice"
    with_recompute = o.host.model_copy(update={"selective_us": 900.0})
    hosts = tuple(with_recompute.model_copy(update={"ranks": r}) for r in (1, 2))
    o = MeasuredOperators(calibration(host=hosts), 1, True)
    assert host_costs(o, "eager").selective == pytest.approx(9e-4 - float(attention.forward))


def test_collectives_take_what_was_measured(tmp_path: Path) -> None:
    path = kept(tmp_path, calibration())
    ulysses = plan(path, strategy="single", **ULYSSES)
    before = estimate(ulysses).notes["time"]["context_comm"]
    slow = tuple(c.model_copy(update={"seconds": 5 * c.seconds}) for c in collectives())
    calibration_file.write_calibration(calibration(collectives=slow), path)
    assert estimate(ulysses).notes["time"]["context_comm"] == pytest.approx(5 * before)


def test_cpu_seconds_are_of_work_alone(tmp_path: Path) -> None:
    """Slower calls only wait; ranks that share cores work no longer; CPU time of calls adds up."""

    batch = {"training.global_batch": 8, "training.micro_batch": 1}

    def used(cpu: float, wall: float = 1e-3, gpus: int = 4) -> float:
        moved = tuple(
            c.model_copy(update={"seconds": wall, "cpu_seconds": cpu}) for c in collectives()
        )
        path = kept(tmp_path, calibration(collectives=moved))
        return float(estimate(plan(path, gpus=gpus, **batch)).notes["cpu_seconds"])

    assert used(1e-4) == used(1e-4, wall=5e-2)
    path = kept(tmp_path, calibration())
    calls = float(estimate(plan(path, gpus=4, **batch)).collectives["count"].sum())
    assert used(2e-3) - used(1e-3) == pytest.approx(4 * 1e-3 * calls * 3, rel=1e-6), (
        "latency grows by the hops of a ring: 3 of 4 ranks for 1 of 2"
    )
    # Half of the microbatches a rank on twice the ranks: only what is done once a step is twice.
    two, four = used(1e-9, gpus=2), used(1e-9, gpus=4)
    time = estimate(plan(path, gpus=2, **batch)).notes["time"]
    assert four - two == pytest.approx(2 * (time["overhead"] + time["optimizer"]), rel=1e-3)


def test_cpu_seconds_are_not_said_where_they_are_not_known(tmp_path: Path) -> None:
    path = kept(tmp_path, calibration())
    assert "cpu_seconds" not in estimate(plan(path)).notes, "no collective says what it uses"
    assert "cpu_seconds" not in estimate(plan(path, gpus=1, strategy="single")).notes, (
        "one rank on two cores has two threads"
    )


def test_reductions_of_tensor_parallelism_wait_during_weight_gradients(tmp_path: Path) -> None:
    def exposed(weight: float, **changes: Any) -> float:
        found = tuple(
            o.model_copy(update={"weight": weight, "backward": 1e-2}) if o.weight else o
            for o in operators()
        )
        path = kept(tmp_path, calibration(operators=found))
        tensor = plan(path, strategy="single", **{"strategy.tensor.size": 2, **changes})
        return float(estimate(tensor).notes["time"]["tensor_comm"])

    none, short, long, longer = map(exposed, (1e-9, 1e-5, 5e-3, 1e-2))
    assert none > short > long == longer > none / 2, "only backward's latency hides"
    deferred = {
        "cluster.gpus": 4,
        "strategy.pipeline.size": 2,
        "strategy.pipeline.schedule": "zb-h1",
    }
    assert exposed(1e-9, **deferred) == pytest.approx(exposed(5e-3, **deferred), rel=1e-6)


def test_ulysses_copies_heads_and_ring_attention_does_not(tmp_path: Path) -> None:
    def compute(slow: float, **changes: Any) -> float:
        memory = tuple(m.model_copy(update={"seconds": slow * m.seconds}) for m in made().memory)
        path = kept(tmp_path, calibration(memory=memory))
        return float(estimate(plan(path, strategy="single", **changes)).notes["time"]["compute"])

    ring = {"strategy.context.size": 2}
    assert compute(1.0, **ring) == compute(9.0, **ring)
    assert compute(1.0, **ULYSSES) < compute(9.0, **ULYSSES)


def test_deferred_weight_gradients_cost_the_host(tmp_path: Path) -> None:
    hosts = tuple(h.model_copy(update={"split_us": 400.0}) for h in calibration().host)

    def compute(schedule: str, **changes: Any) -> float:
        path = kept(tmp_path, calibration(**changes))
        pipeline = {"strategy.pipeline.size": 2, "strategy.pipeline.schedule": schedule}
        full = plan(path, strategy="single", **pipeline)
        each = full.resolve().num_microbatches * full.resolve().shape.layers / 2
        return float(estimate(full).notes["time"]["compute"]) / each

    assert compute("zb-h1", host=hosts) - compute("zb-h1") == pytest.approx(4e-4, rel=1e-3)
    assert compute("1f1b", host=hosts) == compute("1f1b")


@pytest.mark.parametrize(("kind", "calls"), [("routing", 1), ("grouped_linear", 8 * 3)])
def test_an_moe_layer_takes_what_its_own_operators_take(
    kind: Any, calls: int, tmp_path: Path
) -> None:
    def compute(model: str, seconds: float) -> float:
        one = Operator(
            kind=kind, kernels="eager", rows=64, columns=64, inner=8, ranks=1, forward=seconds
        )
        more = tuple(one.model_copy(update={"rows": rows}) for rows in (64, 128, 256))
        path = kept(tmp_path, calibration(operators=(*operators(), *more)))
        full = plan(path, gpus=1, strategy="single", **{"model": model})
        return float(estimate(full).notes["time"]["compute"])

    assert compute("tiny", 1e-4) == compute("tiny", 1e-2)
    shape = plan(gpus=1, strategy="single", **{"model": "tiny-moe"}).resolve()
    moe_layers = shape.num_microbatches * (shape.shape.layers - 1)  # the first layer is dense
    more = compute("tiny-moe", 1e-2) - compute("tiny-moe", 1e-4)
    assert more == pytest.approx(moe_layers * calls * (1e-2 - 1e-4), rel=1e-6)


def test_a_ring_exchanges_and_a_pipeline_sends(tmp_path: Path) -> None:
    path = kept(tmp_path, calibration())
    ring = plan(path, strategy="single", **{"strategy.context.size": 2})
    pipeline = plan(path, strategy="single", **{"strategy.pipeline.size": 2})

    def comm(of: Any, part: str) -> float:
        return float(estimate(of).notes["time"][part])

    before = comm(ring, "context_comm"), comm(pipeline, "pipeline_comm")
    slow = tuple(
        c.model_copy(update={"seconds": 9 * c.seconds}) if c.kind == "exchange" else c
        for c in collectives()
    )
    calibration_file.write_calibration(calibration(collectives=slow), path)
    assert comm(ring, "context_comm") > 5 * before[0]
    assert comm(pipeline, "pipeline_comm") == before[1]


def test_gathers_ahead_hide_what_they_wait_but_not_what_they_copy(tmp_path: Path) -> None:
    def hidden(latency: float, copy: float) -> float:
        found = tuple(
            c.model_copy(update={"seconds": latency + copy * c.bytes}) for c in collectives()
        )
        path = kept(tmp_path, calibration(collectives=found))
        ahead, late = (
            estimate(plan(path, strategy="zero-3", **{"strategy.data.overlap": overlap}))
            for overlap in (True, False)
        )
        return float(late.notes["time"]["data_comm"] - ahead.notes["time"]["data_comm"])

    counts = [
        hidden(latency, copy) / latency
        for latency, copy in ((1e-4, 1e-8), (2e-4, 1e-8), (1e-4, 3e-8))
    ]
    assert counts[0] > 1
    assert counts == pytest.approx([counts[0]] * 3, rel=1e-6), "copies take the ranks' own cores"


def test_one_disturbed_message_moves_no_other_size() -> None:
    def waits(found: tuple[Collective, ...]) -> float:
        o = MeasuredOperators(calibration(collectives=found), 2, True)
        return float(o.collective_seconds("all_reduce", 2**18, 2))

    usual = tuple(
        Collective(kind="all_reduce", group=2, ranks=2, dtype="fp32", bytes=b, seconds=s)
        for b, s in ((256, 1.0e-3), (2**14, 1.1e-3), (2**17, 1.2e-3), (2**20, 2e-3), (2**23, 9e-3))
    )
    late = usual[2].model_copy(update={"seconds": 3e-3})
    assert waits((*usual[:2], late, *usual[3:])) == pytest.approx(waits(usual), rel=0.1)
    assert waits(usual) == pytest.approx(1.25e-3, rel=0.1)


def test_a_scale_multiplies_operators_and_collectives() -> None:
    o = MeasuredOperators(calibration(), 2, True)
    scaled = MeasuredOperators(calibration(scale=Scale(compute=2.0, communication=3.0)), 2, True)
    one, other = (x.operator("linear", "eager", 64, 64, 64).forward for x in (o, scaled))
    assert other == pytest.approx(2 * one)
    sizes = np.array([256.0, 2.0**20])
    assert scaled.collective_seconds("all_reduce", sizes, 2) == pytest.approx(
        3 * o.collective_seconds("all_reduce", sizes, 2)
    )


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_search_over_measured_operators_is_what_estimate_says(
    tmp_path: Path, kernels: str
) -> None:
    path = kept(tmp_path, calibration())
    found = search(plan(path, 2, **{"strategy.kernels": kernels}), top=20)
    assert found.top
    for one in found.top:
        assert estimate(one.plan).step_seconds == pytest.approx(one.seconds, rel=1e-9)


def test_a_file_of_version_1_still_loads_and_holds_no_operators(tmp_path: Path) -> None:
    path = kept(tmp_path, made())
    written = yaml.safe_load(path.read_text())
    del written["operators"]
    written["version"] = 1
    for host in written["host"]:
        for name in set(host) - COSTS_OF_VERSION_1:
            del host[name]
    path.write_text(yaml.safe_dump(written))
    assert calibration_file.read_calibration(path).operators == ()
    assert estimate(plan(path)).step_seconds
    path.write_text(yaml.safe_dump(written | {"version": 4}))
    with pytest.raises(PlanError, match="version"):
        calibration_file.read_calibration(path)
