"""Estimates of users' own modules, traced, are what rehearsal does: every collective of a step, and
the peak memory of every rank.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.costmodel.test_measured_operators import calibration, kept, operators
from tests.costmodel.test_operator_plans import calls, peaks
from tests.parallel import users_language_models
from tests.parallel.test_operators_python import ROTATED, users
from tests.parallel.test_traced_models import (
    ENCODER,
    EXPERTS,
    FOLDED,
    GPT,
    GRID,
    INTERLEAVED,
    MIXED,
    MODELS,
    PAIRED,
    WITHOUT_ROWS,
    Rolled,
    folded,
    graph_of,
    on,
    pipelined,
)
from workbench import verbs
from workbench.engine.python_model.trace_graph import trace_graph
from workbench.errors import PlanError
from workbench.plan.operators.strategy_form import strategy_text
from workbench.plan.operators.traced.traced_json import model_from_json, model_to_json
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.autoshard import ideal_machine, plan_with
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.operator_splits import legal_strategies
from workbench.planner.autoshard.strategy_search.memory_limit import MemoryRefusal
from workbench.planner.operator_plans.fitting_operators import choose_within_memory
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse
from workbench.units import GIB


def estimated(plan: Plan) -> Profile:
    """As the verb, but traced in this process."""
    written = json.dumps(model_to_json(trace_graph(plan, allow_code=True)))
    return estimate(plan, model_from_json(json.loads(written)))


def agrees(plan: Plan) -> None:
    found, rehearsed = estimated(plan), rehearse(plan, allow_code=True)
    for rank in set(found.representative.values()):
        assert calls(found, 0, rank) == calls(rehearsed, 1, rank), rank
    assert peaks(found, 0) == pytest.approx(peaks(rehearsed, 1), rel=0.01)


def test_a_memory_limit_is_held_by_the_estimate() -> None:
    plan = on("tied_gpt", data=4).replace(**{"cluster.gpu": "h100-sxm-80gb"})
    model = trace_graph(plan, allow_code=True, sequences=4)
    with pytest.raises(MemoryRefusal, match="the least that was found takes") as it:
        choose_within_memory(plan, 0.05 * GIB, 2, model=model)
    found = choose_within_memory(plan, it.value.least, 2, model=model)
    assert found.peak and found.peak <= it.value.least
    assert found.peak == max(estimate(plan_with(plan, found), model).peak_bytes_by_rank.values())
    assert found.changes  # no strategies alone are within it


def zero(stage: int, reduce: str = "step") -> dict[str, Any]:
    return {"strategy.data.zero": stage, "strategy.data.reduce": reduce}


ROTARY = {"layers.*.kv": "((1,1),(1,2))", "embed": "((1,1),(2,))"}
STRATEGIES = {
    "encoder_lm": ENCODER,
    "tied_gpt": GPT,
    "einsum_moe": EXPERTS,
    "where_moe": PAIRED,
    "rotary_lm": ROTARY,
}
QUICK = {
    "data": on("encoder_lm", data=2),
    "tied": on("tied_gpt"),
    "zero-3": on("rotary_lm", data=2, changes=zero(3)),
    "pipeline": pipelined("tied_gpt"),
    "tensor": on("encoder_lm", 2, operators=ENCODER),
    "einsum": on("einsum_moe", 2, operators=EXPERTS),
    "experts": on("where_moe", data=2, changes=zero(1)),
    "one sequence": folded(1, FOLDED),
    "complex": users(2, operators=ROTATED, factory="build_rotated"),
}
WIDER = {
    **{f"folded at {n}": folded(n, FOLDED) for n in (2, 3)},
    "folded without rows": folded(2, WITHOUT_ROWS),
    "mixed": on("tied_gpt", 2, operators=MIXED),
    "grid": on("encoder_lm", 4, operators=GRID),
    "transposed": on("encoder_lm", 2, operators=ENCODER, batch_first=False, norm_first=True),
    "tensor in stages": pipelined("encoder_lm", 2, operators=ENCODER),
    "rows in stages": pipelined("encoder_lm", 2, operators={"embed": "((1,1),(2,))"}),
    "tied in stages": pipelined("tied_gpt", 2, operators=GPT),
    "tied zero-3 in stages": pipelined("tied_gpt", data=2, changes=zero(3, "microbatch")),
    "zero-2 by microbatch": on("encoder_lm", data=2, changes=zero(2, "microbatch")),
    "biases by microbatch": on("tied_gpt", 2, 2, GPT, zero(2, "microbatch"), width=256),
    "zero-3 by microbatch": on("encoder_lm", data=2, changes=zero(3, "microbatch")),
    "tensor and zero-3": on("encoder_lm", 2, 2, ENCODER, zero(3)),
    "parameters that nothing reads": users(data=2, factory="build_uncalled", changes=zero(2)),
    "shards of two": on("tied_gpt", data=4, changes=zero(2) | {"strategy.data.shard": 2}),
    "a loss of its own": users(data=2, factory="build_with_loss"),
    "gpipe": pipelined("encoder_lm", changes={"strategy.pipeline.schedule": "gpipe"}),
    "interleaved": pipelined("encoder_lm", changes=INTERLEAVED, layers=4),
}


@pytest.mark.parametrize("name", QUICK)
def test_an_estimate_is_what_every_rank_does(name: str) -> None:
    agrees(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_further_estimates_are_what_every_rank_does(name: str) -> None:
    agrees(WIDER[name])


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("factory", MODELS)
@pytest.mark.parametrize("how", ["one", "data", "zero-1", "zero-2", "zero-3", "stages", "tensor"])
def test_every_model_in_every_way(factory: str, how: str) -> None:
    plans = {
        "one": lambda: on(factory),
        "data": lambda: on(factory, data=2),
        "stages": lambda: pipelined(factory),
        "tensor": lambda: on(factory, 2, operators=STRATEGIES[factory]),
    }
    made = plans.get(how, lambda: on(factory, data=2, changes=zero(int(how[-1]))))
    agrees(made())


def test_the_verb_runs_no_code_unasked() -> None:
    with pytest.raises(PlanError, match="--allow-code"):
        verbs.estimate(pipelined("tied_gpt", 2, operators=GPT))


@pytest.mark.slow
def test_the_verb_traces_in_a_child() -> None:
    plan = pipelined("tied_gpt", 2, operators=GPT).replace(**{"cluster.gpu": "h100-sxm-80gb"})
    found = verbs.estimate(plan, allow_code=True)
    assert found.source == "estimated"
    assert found.step_seconds and 0 < found.step_seconds < 1
    assert calls(found, 0, 0) == calls(estimated(plan), 0, 0)


@pytest.mark.parametrize("verb", [verbs.explain, verbs.search, verbs.compare])
def test_other_verbs_refuse_code_and_name_what_takes_it(verb: Any) -> None:
    with pytest.raises(PlanError, match=r"model.python: .* is code.*legal: estimate"):
        verb(on("tied_gpt"))


def test_an_operator_without_an_entry_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Rolled)
    match = r"roll \(test_traced_models.py:\d+\) is roll; legal: to rehearse or run"
    with pytest.raises(PlanError, match=f"model.python: .* {match}"):
        estimated(on("encoder_lm"))


def test_a_module_that_cannot_be_traced_is_refused_with_the_line() -> None:
    with pytest.raises(PlanError, match=r"users_language_models.py:\d+: if len\(rows\) > 0"):
        estimated(on("nonzero_moe", data=2))


@pytest.mark.parametrize(
    ("field", "value"),
    [("strategy.stack", "megatron"), ("strategy.precision", "fp8"), ("strategy.kernels", "fused")],
)
def test_what_no_traced_module_is_estimated_with_is_refused(field: str, value: Any) -> None:
    changes = {field: value, "cluster.gpu": "h100-sxm-80gb"}
    with pytest.raises(PlanError, match=f"{field}: is '{value}'"):
        estimated(on("tied_gpt", changes=changes))


WIDE = {"vocab": 32000, "width": 2048, "heads": 16, "layers": 4, "longest": 1024, "dropout": 0.0}
"""A model whose compute no host waits for."""


def on_gpus(tensor: int, data: int, operators: dict[str, str], **changes: Any) -> Plan:
    own = {
        **{"cluster.gpu": "h100-sxm-80gb", "strategy.data.bucket_mib": 25, "model.vocab": 32000},
        **{"training.sequence_length": 1024, "training.optimizer.clip": 1.0},
    }
    return on("encoder_lm", tensor, data, operators, own | changes, **WIDE)


def test_a_users_transformer_costs_what_ours_of_its_shape_does() -> None:
    """Two ways to the same figures: from a graph, and from a shape."""
    shape = {"layers": 4, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "mlp": "gelu"}
    shape |= {"norm": "layernorm", "biases": "all", "positions": "learned", "max_positions": 1024}
    theirs = on_gpus(1, 2, {}, **{"strategy.data.zero": 1})
    ours = theirs.model_dump(exclude_unset=True) | {"model": shape}
    found, expected = estimated(theirs), estimate(Plan.model_validate(ours))
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=0.05)
    for figure in ("compute", "data_comm", "optimizer"):
        assert found.notes["time"][figure] == pytest.approx(expected.notes["time"][figure], rel=0.1)
    assert peaks(found, 0) == pytest.approx(peaks(expected, 0), rel=0.01)


def test_redistributions_between_nodes_take_longer() -> None:
    plan = on_gpus(2, 1, ENCODER)
    near, far = (
        estimated(plan.replace(**{"cluster.gpus_per_node": n})).notes["time"]["tensor_comm"]
        for n in (2, 1)
    )
    assert 0 < near < far


def test_a_calibration_prices_its_operators(tmp_path: Path) -> None:
    times = []
    for name, slow in (("one", 1.0), ("slower", 3.0)):
        (tmp_path / name).mkdir()
        path = kept(tmp_path / name, calibration(operators=operators(slow=slow)))
        plan = on("tied_gpt", 2, operators=GPT, changes={"cluster.calibration": str(path)})
        times.append(estimated(plan).notes["time"]["compute"])
    assert times[0] < times[1]


def drawn(seed: int) -> Plan:
    """A legal plan: others are drawn until one is."""
    rng = random.Random(seed)
    while True:
        factory, tensor = rng.choice(MODELS), rng.choice([1, 1, 2, 4])
        data, stages = rng.choice([1, 2]), rng.choice([1, 1, 2])
        microbatch, reduce = rng.choice([1, 2, 4]), rng.choice(["step", "microbatch"])
        forms: dict[str, str] = {}
        if tensor > 1:
            mesh = logical_mesh(tensor, ideal_machine(1e9, 1e9, 0.0, 1e9))
            forms = {
                operator.name: strategy_text(rng.choice(legal_strategies(operator, mesh)).form)
                for operator in graph_of(factory).operators
                if rng.random() < 0.5
            }
        level = rng.choice([0, 1, 2, 3])
        changes = {
            "strategy.data.zero": level,
            **({"strategy.data.reduce": reduce} if level >= 2 else {}),
            "strategy.data.bucket_mib": rng.choice([0.01, 25]),
            "strategy.precision": rng.choice(["fp32", "bf16"]),
            "strategy.pipeline.size": stages,
            "strategy.pipeline.schedule": rng.choice(["1f1b", "gpipe"]),
            "cluster.gpus": tensor * data * stages,
            "training.micro_batch": microbatch,
            "training.global_batch": microbatch * data * rng.choice([2, 4]),
        }
        plan = on(factory, tensor, data, forms, changes)
        try:
            estimated(plan)
        except PlanError:
            continue
        return plan


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(60))
def test_an_estimate_of_a_drawn_plan_is_what_every_rank_does(seed: int) -> None:
    agrees(drawn(seed))
