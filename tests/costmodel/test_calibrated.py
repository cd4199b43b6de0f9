"""Curves through measured points, the plan that uses them, and what finished runs correct."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.measured_curves import MeasuredCurves, fit_nonnegative
from workbench.machine import calibration_file
from workbench.machine.attached import attached, local_cluster
from workbench.machine.calibration_file import (
    AttentionRate,
    Calibration,
    Collective,
    Doubt,
    Gemm,
    Host,
    HostOptimizer,
    Measured,
    Probe,
    Scale,
    Stream,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate
from workbench.planner.calibrated_plan import calibrated_hardware, with_calibration
from workbench.planner.run_feedback import StepObservation, error, scale, step_observation
from workbench.planner.search import search

RATE, HALF, LAUNCH = 80e9, 12.0, 5e-6
ALPHA, BETA = 2e-4, 1e-9


def product_seconds(m: int, n: int, k: int, ranks: int) -> float:
    return LAUNCH + 2 * m * n * k / (RATE / ranks) * (1 + HALF * (1 / m + 1 / n + 1 / k))


SHAPES = [(s, s, s) for s in (32, 128, 512, 1024)] + [
    (2048, 64, 192),
    (64, 2048, 64),
    (256, 64, 1024),
]


def made(**changes: Any) -> Calibration:
    """A machine whose every figure is known, of two cores."""
    found = attached()
    card, _ = local_cluster(found, 1)
    machine = Measured(
        device="cpu",
        card=card.name,
        title=found.name,
        count=8,
        cores=2,
        fingerprint=calibration_file.fingerprint(found),
        backend="gloo",
        versions={"torch": "2.12.0"},
        date="2026-01-01",
    )
    host = Host(
        ranks=1,
        operator_us=2.0,
        autograd_us=6.0,
        step_us=500.0,
        microbatch_us=300.0,
        layer_us=1060.0,
        layer_step_us=100.0,
    )
    kinds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 0.5, "send": 0.5}
    values: dict[str, Any] = {
        "machine": machine,
        "host": (host, host.model_copy(update={"ranks": 2, "layer_us": 2120.0})),
        "gemm": tuple(
            Gemm(
                rows=m,
                columns=n,
                inner=k,
                dtype="fp32",
                ranks=r,
                seconds=product_seconds(m, n, k, r),
            )
            for m, n, k in SHAPES
            for r in (1, 2)
        ),
        "memory": tuple(
            Stream(bytes=b, ranks=r, seconds=b * r / 10e9)
            for b in (2**16, 2**20, 2**26)
            for r in (1, 2)
        ),
        "collectives": tuple(
            Collective(
                kind=k, group=2, ranks=2, dtype="fp32", bytes=b, seconds=x * (ALPHA + BETA * b)
            )
            for k, x in kinds.items()
            for b in (256, 2**16, 2**20, 2**24)
        ),
    }
    return Calibration(**{**values, **changes})


def plan(path: Path | None = None, gpus: int = 2, strategy: str = "ddp", **changes: Any) -> Plan:
    short = Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=changes)
    return short if path is None else short.replace(**{"cluster.calibration": str(path)})


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.yaml"
    calibration_file.write_calibration(made(), path)
    return path


def test_the_form_is_recovered_from_its_own_points() -> None:
    for ranks in (1, 2):
        found = MeasuredCurves(made(), ranks).gemm_fit("fp32")
        assert found.rate == pytest.approx(RATE / ranks, rel=1e-6)
        assert found.half_dim == pytest.approx(HALF, rel=1e-5) and found.launch == pytest.approx(
            LAUNCH, rel=1e-5
        )
        assert np.abs(found.deviations).max() < 1e-5


def test_a_term_that_no_point_has_costs_nothing() -> None:
    terms = np.array([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    assert fit_nonnegative(terms, terms @ [2.0, 3.0, 5.0]) == pytest.approx([2.0, 3.0, 0.0])


def test_one_disturbed_point_does_not_move_the_fit() -> None:
    gemm = list(made().gemm)
    gemm[8] = gemm[8].model_copy(update={"seconds": 9 * gemm[8].seconds})
    found = MeasuredCurves(made(gemm=tuple(gemm)), gemm[8].ranks).gemm_fit("fp32")
    assert found.rate == pytest.approx(RATE / gemm[8].ranks, rel=0.02)


def test_a_measured_shape_is_met_and_a_far_one_follows_the_form() -> None:
    gemm = [
        g.model_copy(update={"seconds": g.seconds * (1.3 if g.rows == 2048 else 1)})
        for g in made().gemm
    ]
    found = MeasuredCurves(made(gemm=tuple(gemm)), 1).gemm_fit("fp32")
    assert found.seconds(2048, 64, 192) == pytest.approx(
        1.3 * product_seconds(2048, 64, 192, 1), rel=1e-3
    )
    assert found.seconds(2**20, 2**20, 2**20) == pytest.approx(
        found.fitted(2**20, 2**20, 2**20), rel=1e-3
    )


def test_products_take_arrays_and_broadcast() -> None:
    found = MeasuredCurves(made(), 1).gemm_fit("fp32")
    rows, columns = np.array([[32], [64], [128]]), np.array([48, 96])
    rates = 2 * rows * columns * 64 / found.seconds(rows, columns, 64)
    assert rates.shape == (3, 2) and (np.diff(rates, axis=0) > 0).all() and (rates < RATE).all()
    assert found.seconds(64, 96, 64) == pytest.approx(found.seconds(rows, columns, 64)[1, 1])


def test_an_offloaded_optimizer_steps_at_the_measured_rate(tmp_path: Path) -> None:
    path, seconds = tmp_path / "calibration.yaml", {}
    changes = {"strategy.precision": "bf16", "strategy.data.zero": 1}
    offloaded = plan(path, 1, **changes, **{"strategy.data.offload": "optimizer"})
    points = {
        rate: HostOptimizer(parameters=2**20, bytes=2**25, ranks=1, seconds=2**25 / rate)
        for rate in (3e9, 6e9)
    }
    for rate, said in ((3e9, "3.0, calibrated"), (6e9, "6.0, calibrated"), (0, "12.0, assumed")):
        point = points.get(rate)
        calibration_file.write_calibration(made(host_optimizer=(point,) if point else ()), path)
        found = estimate(offloaded)
        seconds[rate] = found.notes["time"]["optimizer"]
        assert (
            found.notes["host_optimizer"]
            .replace(" GB/s of host memory a rank", "")
            .startswith(said)
        )
    assert seconds[3e9] == pytest.approx(2 * seconds[6e9]) == pytest.approx(4 * seconds[0])


def test_an_unmeasured_dtype_takes_its_stand_in() -> None:
    assert MeasuredCurves(made(), 1).gemm_fit("fp16").rate == pytest.approx(RATE, rel=1e-6)


def test_more_ranks_than_were_measured_wait_for_cores() -> None:
    four, two = MeasuredCurves(made(), 4), MeasuredCurves(made(), 2)
    assert four.gemm_fit("fp32").rate == pytest.approx(two.gemm_fit("fp32").rate / 2)
    assert four.host.layer_us == pytest.approx(2 * two.host.layer_us)
    assert four.memory_rate(2**20) == pytest.approx(two.memory_rate(2**20) / 2)


def test_memory_is_straight_on_logarithmic_paper_and_proportional_beyond() -> None:
    found = MeasuredCurves(made(), 1)
    assert found.memory_rate(2**18) == pytest.approx(10e9) and found.memory_rate(
        2**30
    ) == pytest.approx(10e9)
    assert found.stream_seconds(1) == found.stream_seconds(2**16), (
        "a tiny tensor is no quicker than the smallest seen"
    )


def test_collectives_by_kind_size_and_group() -> None:
    found = MeasuredCurves(made(), 2)
    assert found.alpha_beta("all_reduce", 2) == pytest.approx((2 * ALPHA, 2 * BETA), rel=1e-6)
    sizes = np.array([256, 2**20, 2**24])
    assert found.collective_seconds("all_gather", sizes, 2) == pytest.approx(ALPHA + BETA * sizes)
    assert found.collective_seconds("recv", 2**20, 2) == pytest.approx(0.5 * (ALPHA + BETA * 2**20))
    assert (found.collective_seconds("all_reduce", sizes, 1) == 0).all()
    ring = MeasuredCurves(made(), 1).collective_seconds("all_gather", 2**24, 4)
    assert ring == pytest.approx(3 * ALPHA + 1.5 * BETA * 2**24, rel=1e-6), "ring: hops and (n-1)/n"
    with pytest.raises(ValueError, match="holds no all_reduce"):
        MeasuredCurves(made(collectives=()), 2).collective_seconds("all_reduce", 1, 2)


def test_a_larger_message_never_counts_as_quicker() -> None:
    points = [
        c.model_copy(update={"seconds": 0.5}) if c.bytes == 256 else c for c in made().collectives
    ]
    times = MeasuredCurves(made(collectives=tuple(points)), 2).collective_seconds(
        "all_reduce", 2.0 ** np.arange(6, 28), 2
    )
    assert (np.diff(times) >= 0).all() and times[0] < 0.01


def test_coefficients_are_never_negative() -> None:
    terms = np.stack((np.ones(4), np.arange(1.0, 5.0)), axis=1)
    assert (fit_nonnegative(terms, np.array([4.0, 3.0, 2.0, 1.0])) >= 0).all()
    assert fit_nonnegative(terms, terms @ np.array([0.0, 2.0])) == pytest.approx(
        [0.0, 2.0], abs=1e-9
    )


def test_without_a_calibration_nothing_changes() -> None:
    full = plan().resolve()
    assert calibrated_hardware(full) == (full.gpu, full.fabric, {})


def test_a_calibrated_plan_has_the_measured_figures(kept: Path) -> None:
    full = plan(kept).resolve()
    card, fabric, changed = calibrated_hardware(full)
    assert card.tflops == pytest.approx(
        {"fp32": RATE / 2 / 1e12}
    ) and card.bandwidth_gbs == pytest.approx(5.0)
    assert card.memory_gib == full.gpu.memory_gib, "memory is not measured"
    assert card.link_gbs == pytest.approx(
        1 / (2 * BETA) / 1e9
    ) and fabric.link_latency_us == pytest.approx(ALPHA * 1e6)
    assert "measured" in card.source
    assert changed["gemm_share"] == pytest.approx(1) and changed["gemm_half_dim"] == pytest.approx(
        HALF, rel=1e-4
    )
    assert changed["step_doubling_ms"] == 0 and changed["launch_us"] == pytest.approx(20.0)
    assert set(changed) <= set(Constants.__dataclass_fields__)
    assert all(math.isfinite(value) and value >= 0 for value in changed.values())


def test_one_rank_keeps_its_link(kept: Path) -> None:
    full = plan(kept, gpus=1, strategy="single").resolve()
    card, fabric, changed = calibrated_hardware(full)
    assert (card.link_gbs, fabric.link_latency_us) == (
        full.gpu.link_gbs,
        full.fabric.link_latency_us,
    )
    assert "link_share" not in changed and changed["gemm_share"] == pytest.approx(1)
    assert card.tflops == pytest.approx({"fp32": RATE / 1e12}), "one rank has the machine to itself"


def test_a_published_peak_stays_and_shares_are_of_it(tmp_path: Path) -> None:
    machine = made().machine.model_copy(
        update={"device": "cuda", "card": "h100-sxm-80gb", "backend": "nccl"}
    )
    gemm = tuple(
        g.model_copy(update={"dtype": "bf16", "seconds": g.seconds / 5000}) for g in made().gemm
    )
    path = tmp_path / "h100.yaml"
    calibration_file.write_calibration(made(machine=machine, gemm=gemm), path)
    full = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3").replace(
        **{"cluster.calibration": str(path)}
    )
    card, _, changed = calibrated_hardware(full.resolve())
    published = full.resolve().gpu
    assert (card.tflops, card.bandwidth_gbs) == (published.tflops, published.bandwidth_gbs)
    assert changed["gemm_share"] == pytest.approx(
        RATE / 2 * 5000 / (published.tflops["bf16"] * 1e12), rel=1e-3
    )
    assert changed["step_fixed_ms"] == 10.0, "eight nodes were not measured by one"


def test_an_estimate_uses_the_file(kept: Path) -> None:
    slow = made(gemm=tuple(g.model_copy(update={"seconds": 100 * g.seconds}) for g in made().gemm))
    before = estimate(plan(kept))
    calibration_file.write_calibration(slow, kept)
    after = estimate(plan(kept))
    assert after.notes["time"]["compute"] > 20 * before.notes["time"]["compute"]
    assert after.peak_bytes_by_rank == before.peak_bytes_by_rank
    assert before.step_seconds != estimate(plan()).step_seconds


def test_a_scale_multiplies_its_part_of_the_step(kept: Path) -> None:
    base = estimate(plan(kept)).notes["time"]
    calibration_file.write_calibration(
        made(scale=Scale(compute=2.0, communication=3.0, fixed_ms=7.0)), kept
    )
    found = estimate(plan(kept)).notes["time"]
    assert found["compute"] == pytest.approx(2 * base["compute"]) and found[
        "optimizer"
    ] == pytest.approx(2 * base["optimizer"])
    assert found["data_comm"] == pytest.approx(3 * base["data_comm"])
    assert found["overhead"] == pytest.approx(base["overhead"] + 7e-3)


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
def test_probes_settle_what_memory_bound_operators_cost(tmp_path: Path, kernels: str) -> None:
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "ffn": 384, "vocab": 512}
    probes = tuple(
        Probe(**sizes, sequence=64, microbatches=2, ranks=r, seconds=0.5 * r) for r in (1, 2)
    )
    path = tmp_path / "calibration.yaml"
    calibration_file.write_calibration(made(probes=probes), path)
    cluster = {"gpu": "local", "gpus": 1, "calibration": str(path)}
    training = {"sequence_length": 64, "global_batch": 2, "micro_batch": 1}
    written = build_plan(
        {"model": sizes, "cluster": cluster, "training": training, "strategy": {"kernels": kernels}}
    )
    seconds = estimate(written).step_seconds
    assert seconds is not None
    # Fused kernels leave a processor's small seams plain: what is measured of eager ones holds of
    # them.
    assert seconds < 0.4 if kernels == "compiled" else seconds == pytest.approx(0.5, rel=0.02)


def test_one_run_is_met_exactly() -> None:
    run = step_observation(
        1.0, {"compute": 0.3, "bubble": 0.1, "optimizer": 0.05, "data_comm": 0.05, "overhead": 0.1}
    )
    assert (run.compute, run.communication, run.overhead) == pytest.approx((0.45, 0.05, 0.1))
    found = scale([run], Scale())
    assert found.compute == pytest.approx(1.8) == found.communication and found.fixed_ms == 0
    assert error(
        [StepObservation(1.0, 0.45 * found.compute, 0.05 * found.communication, 0.1)]
    ) == pytest.approx(0, abs=1e-12)


def test_two_runs_share_one_factor() -> None:
    """Two steps cannot tell three numbers apart: the fit would meet both and predict nothing."""
    runs = [StepObservation(2.0, 0.9, 0.1, 0.0), StepObservation(2.4, 0.5, 0.3, 0.0)]
    found = scale(runs, Scale())
    assert 2.0 < found.compute == found.communication < 3.0 and found.fixed_ms == 0


def test_several_runs_tell_compute_communication_and_fixed_cost_apart() -> None:
    parts = [(1.0, 0.0), (0.1, 0.9), (3.0, 0.5), (0.02, 0.01), (0.5, 2.0)]
    runs = [StepObservation(1.5 * c + 4.0 * m + 0.02 + 0.01, c, m, 0.01) for c, m in parts]
    found = scale(runs, Scale())
    assert found.compute == pytest.approx(1.5, rel=0.03) and found.communication == pytest.approx(
        4.0, rel=0.03
    )
    assert found.fixed_ms == pytest.approx(20, rel=0.1)


def test_a_step_shorter_than_its_overhead_still_gives_positive_factors() -> None:
    found = scale([StepObservation(0.01, 0.1, 0.0, 0.05)], Scale())
    assert 0 < found.compute < 1 and found.fixed_ms == 0


@pytest.mark.parametrize(
    ("objective", "where"), [("time", ["strategy.pipeline.size=2"]), ("gpus", [])]
)
def test_a_search_on_a_measured_machine_is_what_estimate_says(
    tmp_path: Path, objective: str, where: list[str]
) -> None:
    calibration_file.write_calibration(made(), tmp_path / "cal.yaml")
    found = search(plan(tmp_path / "cal.yaml", 4), objective, where=where, top=20)
    worlds = {one.plan.world_size for one in (*found.top, *found.pareto)}
    assert worlds == ({4} if objective == "time" else {1, 2, 4})
    for one in (*found.top, *found.pareto):
        assert estimate(one.plan).step_seconds == pytest.approx(one.seconds, rel=1e-9)


def test_a_search_fetches_the_constants_of_a_number_of_stages_once(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Plan] = []

    def counted(full: ResolvedPlan) -> Any:
        fetched.append(full)
        return with_calibration(full)

    monkeypatch.setattr("workbench.planner.search.cell_evaluation.with_calibration", counted)
    search(plan(kept, 4), space="wide")
    staged = [full.strategy.pipeline.size for full in fetched if full.strategy.pipeline.size > 1]
    assert staged and len(staged) == len(set(staged)) and len(fetched) <= len(set(staged)) + 3


def test_a_plan_of_refused_figures_takes_the_catalogs_and_says_so(tmp_path: Path) -> None:
    doubt = Doubt(
        section="collectives",
        point="collectives kind all_reduce, group 2, dtype fp32, bytes 256",
        ranks=2,
        why="took no measurable time",
        refused=True,
    )
    others = tuple(c for c in made().collectives if c.kind != "all_reduce")
    path = tmp_path / "doubtful.yaml"
    calibration_file.write_calibration(
        made(collectives=others, doubts=(doubt, doubt.model_copy(update={"refused": False}))), path
    )
    assert calibration_file.read_calibration(path).doubt == "1 figure unsteady, 1 figure refused"
    full = plan(path).resolve()
    card, fabric, _ = calibrated_hardware(full)
    assert (
        card.link_gbs == full.gpu.link_gbs and fabric.link_latency_us == full.fabric.link_latency_us
    )
    assert card.source.endswith("1 figure unsteady, 1 figure refused, link of the catalog")
    assert estimate(full).step_seconds


def test_an_estimate_of_cpu_ranks_says_whether_it_was_calibrated(kept: Path) -> None:
    for bare in (plan(), Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp")):
        said = estimate(bare)
        assert ("uncalibrated" in said.notes) == (bare.resolve().gpu.device == "cpu")
        assert ("workbench calibrate" in repr(said)) == ("uncalibrated" in said.notes)
    assert "uncalibrated" not in estimate(plan(kept)).notes


def test_attention_takes_the_rates_of_its_kernel_and_dtype() -> None:
    """A step with the efficient kernel is not estimated by flash, nor fp16 by bf16."""
    rows = [
        ("bf16", "flash", 1.0),
        ("bf16", "efficient", 2.0),
        ("fp16", "efficient", 3.0),
        ("fp32", "efficient", 8.0),
    ]
    sizes = {"batch": 1, "heads": 4, "sequence": 512, "head_dim": 64, "ranks": 1}
    attention = tuple(
        AttentionRate(**sizes, dtype=dtype, kernel=kernel, forward=seconds, backward=2 * seconds)
        for dtype, kernel, seconds in rows
    )
    flops = 2 * 4 * 512**2 * 64

    def seconds(curves: MeasuredCurves, *which: str) -> float:
        rates = curves.attention_rates(*which)
        assert rates is not None and rates[1] == 2.0
        return flops / rates[0]

    curves = MeasuredCurves(made().model_copy(update={"attention": attention}), 1)
    asked = [("bf16", "flash"), ("bf16", "efficient"), ("fp16", "efficient"), ("fp32", "efficient")]
    assert [seconds(curves, *which) for which in asked] == [1.0, 2.0, 3.0, 8.0]
    assert seconds(curves, "fp16", "flash") == 1.0, "bf16 stands for fp16"
    assert seconds(curves, "bf16", "auto") == seconds(curves, "bf16", "math") == 1.0
    unknown = tuple(row.model_copy(update={"kernel": None}) for row in attention[1:2])
    curves = MeasuredCurves(made().model_copy(update={"attention": unknown}), 1)
    assert seconds(curves, "bf16", "flash") == 2.0, "what torch chose"


def on_gpu(
    tmp_path: Path, kernels: str, fused_layer_us: float | None, precision: str = "fp32"
) -> tuple[Plan, Any]:
    """A plan on a calibrated GPU, whose host takes so long for a fused layer, and its constants."""
    machine = made().machine.model_copy(
        update={"device": "cuda", "card": "h100-sxm-80gb", "backend": "nccl"}
    )
    gemm = tuple(
        g.model_copy(update={"dtype": "bf16", "seconds": g.seconds / 5000}) for g in made().gemm
    )
    memory = tuple(s.model_copy(update={"seconds": s.seconds / 300}) for s in made().memory)
    measured = {"fused_layer_us": fused_layer_us, "precision": precision}
    host = made().host[0].model_copy(update=measured)
    path = tmp_path / f"{kernels}-{fused_layer_us}-{precision}.yaml"
    calibration_file.write_calibration(
        made(machine=machine, gemm=gemm, memory=memory, host=(host,)), path
    )
    narrow = {"layers": 16, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 1024}
    changes = {"model": narrow, "strategy.kernels": kernels, "strategy.precision": "bf16"}
    short = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=1, strategy="single", set=changes)
    written = short.replace(**{"cluster.calibration": str(path)})
    return written, calibrated_hardware(written.resolve())[2]


def test_a_fused_layer_takes_the_host_what_was_measured_of_one(tmp_path: Path) -> None:
    """A narrow model's step waits for the host: longer by what fused layers take more."""
    quick, slow = (on_gpu(tmp_path, "fused", us) for us in (1000.0, 3000.0))
    assert slow[1]["launch_us"] == pytest.approx(3 * quick[1]["launch_us"])
    microbatches, layers = quick[0].resolve().num_microbatches, 16
    seconds = [estimate(each[0]).step_seconds for each in (quick, slow)]
    assert seconds[1] - seconds[0] == pytest.approx(2e-3 * layers * microbatches, rel=0.1)
    eager = [estimate(on_gpu(tmp_path, "eager", us)[0]).step_seconds for us in (1000.0, 3000.0)]
    assert eager[0] == eager[1], "an eager layer is measured apart"


def test_without_a_measured_fused_layer_an_eager_one_stands_for_it(tmp_path: Path) -> None:
    """As in files that former versions wrote."""
    former = on_gpu(tmp_path, "fused", None)[1]
    assert former["launch_us"] == on_gpu(tmp_path, "fused", 1060.0)[1]["launch_us"]
    assert former["launch_us"] > 2 * on_gpu(tmp_path, "eager", None)[1]["launch_us"]


def test_a_layer_measured_in_16_bits_launched_its_casts_too(tmp_path: Path) -> None:
    """Eager norms and positions compute in fp32: ten kernels more."""
    wide, narrow = (on_gpu(tmp_path, "eager", None, x)[1]["launch_us"] for x in ("fp32", "bf16"))
    assert wide == pytest.approx(1060.0 / 107) and narrow == pytest.approx(1060.0 / 117)
