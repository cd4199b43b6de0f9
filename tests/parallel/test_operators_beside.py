"""Operator strategies beside every other choice of a plan equal one device."""

from typing import Any

import pytest
import torch

from tests.parallel.small import CHUNKS, GPT, LLAMA
from tests.parallel.sweep import MOE
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from tests.parallel.test_operators import GRID, INNER, ROWS, collectives, megatron, on
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.parallel.operators import apply_operators, moe_operator, operator_forward
from workbench.parallel.operators.redistribution import OperatorSharding
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.rehearsal.rehearse import rehearse

Choice = tuple[tuple[int, ...], dict[str, str], dict[str, Any], dict[str, Any]]
"""Mesh (tensor x pipeline x data), operators, changes of the plan, changes of the shape."""

MEGATRON = megatron(2)
ATTEND = {
    "blocks.1.*.attend": "((1,2,1,1),(1,2,1,1),(1,2,1,1))",
    "blocks.*.activate": "((1,2),(1,2))",
}
WIDTH = {
    "blocks.*.attention.o": "((1,1),(1,2))",
    "blocks.*.mlp.down": "((1,1),(1,2))",
    "embedding.tokens": "((1,2),(1,))",
}
"""Outputs sharded by width, which dropout then reads."""
OF_ATTENTION = {name: form for name, form in MEGATRON.items() if ".mlp." not in name}
MOE_WIDTH = OF_ATTENTION | {"blocks.*.mlp": "((1,),(2,))"}
MOE_GRID = {name: form for name, form in GRID.items() if ".mlp." not in name}
MOE_GRID |= {"blocks.*.mlp": "((2,),(2,))"}
MOE_ROWS = OF_ATTENTION | {"blocks.*.mlp": "((2,),(1,))"}
SHARED_EXPERTS: dict[str, Any] = {
    **MOE,
    "biases": "all",
    "moe": {**MOE["moe"], "shared": 1, "first_dense": 1, "capacity": 1.5, "auxiliary_loss": 0.01},
}
PARTS = ["blocks.*.mlp.activate", "blocks.*.attention.attend"]
OPERATORS = {"megatron": MEGATRON, "rows": ROWS, "attend": ATTEND, "width": WIDTH}
DROPOUT = {"training.dropout": 0.2}


def beside(*mesh: int, operators: dict[str, str], layers: int = 2, **more: Any) -> Plan:
    """`more` with `changes` of the plan, and the rest of the shape."""
    more["changes"] = {"training.global_batch": 8, **more.pop("changes", {})}
    return on(*mesh, operators=operators, layers=layers, **more)


def equal(plan: Plan) -> None:
    assert_equal_to_one_device(verify(plan, "fp64"))


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize(
    "what",
    ["full", "selective", [1], PARTS, ["blocks.*.mlp"], ["blocks.*.attention"], ["blocks.0", 1]],
    ids=str,
)
def test_with_recompute(what: Any, operators: str) -> None:
    equal(beside(2, operators=OPERATORS[operators], changes={"strategy.recompute": what}))


def test_with_recompute_on_a_grid() -> None:
    equal(beside(4, operators=GRID, shape=GPT, changes={"strategy.recompute": "full"}))


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("recompute", ["none", "full", PARTS], ids=str)
@pytest.mark.parametrize(("operators", "tied"), [("megatron", True), ("rows", False)])
def test_with_a_pipeline(schedule: str, recompute: Any, operators: str, tied: bool) -> None:
    changes = {
        "strategy.pipeline.schedule": schedule,
        "strategy.pipeline.chunks": CHUNKS[schedule],
        "strategy.recompute": recompute,
    }
    equal(beside(2, 2, operators=OPERATORS[operators], layers=4, tied=tied, changes=changes))


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["split", "round_robin"])
def test_with_unequal_replicas_of_stages(distribution: str) -> None:
    changes = {
        "strategy.pipeline.replicas": [1, 3],
        "strategy.pipeline.distribution": distribution,
        "training.micro_batch": 6,
        "training.global_batch": 18,
    }
    equal(beside(2, 2, 2, operators=ROWS, layers=4, changes=changes))


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("reduce", ["step", "microbatch"])
@pytest.mark.parametrize("recompute", ["none", "full", PARTS], ids=str)
@pytest.mark.parametrize("operators", ["megatron", "rows"])
def test_with_zero(zero: int, reduce: str, recompute: Any, operators: str) -> None:
    changes = {
        "strategy.data.zero": zero,
        "strategy.data.reduce": reduce,
        "strategy.recompute": recompute,
    }
    tied = operators == "megatron"
    equal(beside(2, 1, 2, operators=OPERATORS[operators], tied=tied, changes=changes))


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.data.shard": 2},
        {"strategy.data.offload": "optimizer"},
        {"strategy.data.offload": "parameters"},
        {"strategy.data.keep_gathered": True},
    ],
    ids=str,
)
def test_with_ways_of_zero_3(changes: dict[str, Any]) -> None:
    equal(beside(2, 1, 4, operators=MEGATRON, changes={"strategy.data.zero": 3, **changes}))


@pytest.mark.parametrize("operators", ["width", pytest.param("rows", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_with_dropout(operators: str, recompute: str) -> None:
    changes = {"strategy.recompute": recompute, **DROPOUT}
    equal(beside(2, operators=OPERATORS[operators], changes=changes))


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("algorithm", ["ring", "ulysses"])
@pytest.mark.parametrize("operators", ["megatron", "rows", "attend"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_with_context_parallelism(
    algorithm: str, operators: str, recompute: str, dropout: float
) -> None:
    changes = {
        "cluster.gpus": 4,
        "strategy.context": {"size": 2, "algorithm": algorithm},
        "strategy.recompute": recompute,
        "training.dropout": dropout,
    }
    equal(beside(2, operators=OPERATORS[operators], changes=changes))


MOE_CASES: dict[str, Choice] = {
    "replicated": ((2,), OF_ATTENTION, {}, MOE),
    "width": ((2,), MOE_WIDTH, {"strategy.recompute": "full"}, MOE),
    "rows": ((2,), MOE_ROWS, {"strategy.recompute": ["blocks.*.mlp"]}, MOE),
    "rows and width": ((4,), MOE_GRID, {}, MOE),
    "width, expert ranks": ((2, 1, 2), MOE_WIDTH, {"strategy.expert.size": 2}, MOE),
    "rows, expert ranks": ((2, 1, 2), MOE_ROWS, {"strategy.expert.size": 2}, MOE),
    "rows, pipeline": ((2, 2), MOE_ROWS, {"strategy.pipeline.schedule": "zb-h1"}, MOE),
    "shared experts, width": ((2,), MOE_WIDTH, {}, SHARED_EXPERTS),
    "shared experts, rows": ((2,), MOE_ROWS, DROPOUT, SHARED_EXPERTS),
}


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", MOE_CASES)
def test_with_experts(name: str) -> None:
    mesh, operators, changes, shape = MOE_CASES[name]
    equal(beside(*mesh, operators=operators, shape=shape, changes=changes))


@pytest.mark.parametrize("operators", ["rows", pytest.param("megatron", marks=pytest.mark.slow)])
def test_with_fused_kernels(operators: str) -> None:
    norms = {"blocks.*.*_norm": "((2,1),(1,))"} if operators == "rows" else {}
    changes = {"strategy.kernels": "fused", "strategy.recompute": "selective"}
    equal(beside(2, operators=OPERATORS[operators] | norms, changes=changes))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_compiled_kernels() -> None:
    equal(beside(2, operators=MEGATRON, changes={"strategy.kernels": "compiled"}))


def activations(what: Any) -> float:
    """Largest bytes of activations on rank 0."""
    built = beside(2, operators=MEGATRON, changes={"strategy.recompute": what})
    memory = rehearse(built, ranks=[0]).memory
    found: float = memory[memory["category"] == "activations"]["bytes"].max()
    return found


def test_what_is_recomputed_is_not_saved() -> None:
    by_kind = [activations(what) for what in ("none", PARTS, ["blocks.*.mlp"], "full")]
    assert by_kind == sorted(set(by_kind), reverse=True)


def test_recomputing_parts_communicates_nothing_again() -> None:
    def moved(what: Any) -> dict[tuple[Any, ...], int]:
        return collectives(
            beside(2, operators=ATTEND | INNER, changes={"strategy.recompute": what})
        )

    assert moved(PARTS) == moved("none") != moved("full")


def _recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


@pytest.mark.parametrize("mesh", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_reduction_forgotten_when_recomputed_is_found(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...]
) -> None:
    reduce = OperatorSharding.reduce_partial

    def once(self: OperatorSharding, y: torch.Tensor, **dims: int) -> torch.Tensor:
        return y if _recomputing() else reduce(self, y, **dims)

    monkeypatch.setattr(OperatorSharding, "reduce_partial", once)
    plan = beside(*mesh, operators=MEGATRON, changes={"strategy.recompute": "full"})
    worst = failure_of(verify(plan))
    assert worst["kind"] in ("gradients", "weights") and worst["tensor"] != "loss"


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_a_partial_gradient_forgotten_in_a_pipeline_is_found(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(OperatorSharding, "partial_layout", OperatorSharding.layout)
    changes = {"strategy.pipeline.schedule": schedule}
    columns = {"blocks.*.mlp.up": "((1,1),(1,2))"}
    assert failure_of(verify(beside(2, 2, operators=columns, changes=changes)))["tensor"]


def test_a_mask_of_another_ranks_channels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_forward, "joint_index", lambda axes: (0, 1))
    assert failure_of(verify(beside(2, operators=WIDTH, changes=DROPOUT)))["tensor"]


@pytest.mark.parametrize("fault", ["aux loss", "router"])
def test_a_gradient_of_the_router_summed_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "aux loss":
        monkeypatch.setattr(moe_operator, "scale_gradient", lambda loss, scale: loss)
    else:
        monkeypatch.setattr(apply_operators, "PARTIAL_OVER_WIDTH", ())
    worst = failure_of(verify(beside(2, operators=MOE_WIDTH, shape=SHARED_EXPERTS)))
    assert "route" in worst["tensor"] or fault == "aux loss"


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"strategy.tensor.sequence": True}, "strategy.tensor.sequence", "say how they are split"),
        ({"strategy.expert.tensor": 2}, "strategy.expert.tensor", r"legal: null, e.g. with"),
        (
            {"strategy.context": {"size": 4, "algorithm": "ulysses"}, "cluster.gpus": 8},
            "strategy.context.size",
            "exchanges heads over 4 ranks, but blocks.0.attention has 2 on a rank, of 4 that",
        ),
        (
            {
                "strategy.pipeline": {"size": 2, "replicas": [1, 3]},
                "cluster.gpus": 8,
                "training.micro_batch": 4,
                "training.global_batch": 8,
                "strategy.operators": ROWS,
            },
            "strategy.operators.head",
            "splits rows into 2 pieces, but 2 does not divide its 1",
        ),
    ],
)
def test_other_answers_to_how_an_operator_is_split_are_refused(
    changes: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        require(on(2, operators=MEGATRON, shape=LLAMA, changes=changes).resolve(), "run")
    assert field in [problem.field for problem in refused.value.problems]
