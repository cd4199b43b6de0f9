"""A strategy for each operator equals one device, and moves what the planner says."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.parallel import apply_strategy
from workbench.parallel.operators.operator_forward import LinearOperator
from workbench.parallel.operators.redistribution import OperatorSharding
from workbench.plan.operators.strategy_form import read_strategies
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planner.autoshard import choose_strategies, ideal_machine
from workbench.rehearsal.rehearse import rehearse


def megatron(ranks: int, shape: Mapping[str, Any] = LLAMA) -> dict[str, str]:
    """Columns before rows (1909.08053), written as operators."""
    column, row = f"((1,1),(1,{ranks}))", f"((1,{ranks}),({ranks},1))"
    gated = {"blocks.*.mlp.gate": column} if shape is LLAMA else {}
    return gated | {
        "embedding.tokens": f"(({ranks},1),(1,))",
        "blocks.*.attention.[qkv]": column,
        "blocks.*.attention.o": row,
        "blocks.*.mlp.up": column,
        "blocks.*.mlp.down": row,
        "head": column,
    }


GRID = {
    "embedding.tokens": "((2,1),(2,))",
    "blocks.*.*_norm": "((2,1),(1,))",
    "blocks.*.attention.[qkv]": "((2,1),(1,2))",
    "blocks.*.attention.o": "((2,2),(2,1))",
    "blocks.*.mlp.up": "((2,1),(1,2))",
    "blocks.*.mlp.down": "((2,2),(2,1))",
    "head": "((2,1),(1,2))",
}
"""Two ways by sequence, two ways within each product, on 2 x 2 ranks."""
ROWS = {
    "embedding.tokens": "((1,1),(2,))",
    "blocks.*.attention.[qkv]": "((2,1),(1,1))",
    "blocks.*.mlp.up": "((2,1),(1,1))",
    "blocks.*.mlp.down": "((2,1),(1,1))",
    "head": "((2,1),(1,1))",
}


def on(
    *mesh: int, operators: dict[str, str], changes: dict[str, Any] | None = None, **more: Any
) -> Plan:
    return plan(
        *mesh, changes={"strategy.operators": operators, **(changes or {})}, microbatches=2, **more
    )


def equal(built: Plan, precision: Any = "fp64") -> None:
    answer = verify(built, precision)
    assert answer["passed"], answer


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_columns_before_rows(shape: dict[str, Any], precision: str) -> None:
    equal(on(2, operators=megatron(2, shape), shape=shape, layers=2), precision)


def test_columns_before_rows_on_four_ranks() -> None:
    equal(on(4, operators=megatron(4, GPT), shape=GPT, layers=2))


INNER = {
    "blocks.*.mlp.up": "((1,2),(2,1))",
    "blocks.*.mlp.gate": "((1,2),(2,1))",
    "blocks.*.mlp.down": "((1,2),(2,1))",
}


@pytest.mark.parametrize(
    "operators",
    [
        INNER,
        {"blocks.*.mlp.up": "((1,1),(1,1))"},
        ROWS,
        {
            "blocks.1.*.attend": "((1,2,1,1),(1,2,1,1),(1,2,1,1))",
            "blocks.*.activate": "((1,2),(1,2))",
        },
        {"head": "((1,1),(1,2))", "head.loss": "((2,1),(2,))", "embedding.tokens": "((1,2),(1,))"},
    ],
    ids=["row-row", "replicated", "rows", "attention", "loss"],
)
def test_other_strategies(operators: dict[str, str]) -> None:
    equal(on(2, operators=operators, shape=LLAMA, layers=2, vocab=258))


MIXED = {
    "embedding.tokens": "((2,2),(1,))",
    "blocks.*.mlp.up": "((1,2),(2,2))",
    "blocks.*.mlp.down": "((1,2),(2,2))",
    "blocks.0.attention.[qkv]": "((1,1),(1,4))",
    "head": "((1,2),(2,2))",
}


@pytest.mark.slow
@pytest.mark.parametrize("operators", [GRID, MIXED], ids=["rows", "inner"])
def test_grids_of_two_by_two(operators: dict[str, str]) -> None:
    equal(on(4, operators=operators, shape=GPT, layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "more"),
    [
        ((2, 1, 2), {}, {}),
        ((2, 1, 2), {"strategy.data.zero": 3}, {}),
        ((2, 2, 1), {"strategy.pipeline.schedule": "zb-h1"}, {"tied": True}),
        ((2, 1, 1), {}, {"tied": True}),
    ],
    ids=["data", "zero-3", "pipeline", "tied"],
)
def test_with_other_axes(
    mesh: tuple[int, ...], changes: dict[str, Any], more: dict[str, Any]
) -> None:
    equal(on(*mesh, operators=megatron(2), shape=LLAMA, changes=changes, layers=2, **more))


def test_a_tied_weight_of_tokens_and_rows_with_zero() -> None:
    """The embedding is split by tokens, the head by sequences: both leave parts of one gradient."""
    operators, changes = ROWS | {"embedding.tokens": "((1,1),(1,2))"}, {"strategy.data.zero": 2}
    equal(on(2, 1, 2, operators=operators, shape=GPT, changes=changes, layers=1, tied=True))


def collectives(built: Plan) -> dict[tuple[Any, ...], int]:
    frame = rehearse(built, ranks=[0]).collectives
    frame = frame[(frame["step"] == 1) & (frame["axis"] == "tensor")]
    found: dict[tuple[Any, ...], int] = {}
    for row in frame.to_dict("records"):
        key = (row["kind"], row["group_size"], row["bytes"], row["action"])
        found[key] = found.get(key, 0) + row["count"]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_columns_before_rows_communicate_as_algorithm_1d(ranks: int) -> None:
    operators = on(ranks, operators=megatron(ranks, GPT), shape=GPT, layers=1, vocab=256)
    assert (
        collectives(operators) == collectives(operators.replace(**{"strategy.operators": {}})) != {}
    )


def test_the_planner_counts_the_same_parameters() -> None:
    built = on(2, operators=megatron(2, GPT), shape=GPT, layers=2, vocab=256).resolve()
    t = built.training
    planned = choose_strategies(
        built.shape,
        t.micro_batch * t.sequence_length,
        2,
        ideal_machine(1e12, 1e9, 1e-6),
        sequence_length=t.sequence_length,
        fused=True,
        fixed=read_strategies(built.strategy.operators),
    )
    size = t.micro_batch * t.sequence_length * built.shape.hidden
    moved = collectives(built)
    for when, action in (("forward", "F"), ("backward", "B")):
        wide = sum(
            row.times
            for row in planned.rows
            for move in row.moves
            if move.kind == "all_reduce" and move.when == when and move.bytes == size * 2
        )
        assert moved[("all_reduce", 2, size * 4, action)] == wide * built.num_microbatches
    assert not planned.redistributions


def test_strategies_that_the_planner_chooses_run() -> None:
    built = on(4, operators={}, shape=GPT, layers=1).resolve()
    t, machine = built.training, ideal_machine(1e9, 1e12, 0, 1e12)
    tokens = t.micro_batch * t.sequence_length
    chosen = choose_strategies(
        built.shape, tokens, 4, machine, sequence_length=t.sequence_length, fused=True
    ).forms
    assert {"((2,1),(1,2))", "((2,1,2),(2,1),(2,2,1))"} <= set(chosen.values())
    equal(on(4, operators=chosen, shape=GPT, layers=1))


def failure(built: Plan) -> dict[str, Any]:
    answer = verify(built)
    assert not answer["passed"], answer
    worst: dict[str, Any] = answer["worst"]
    assert worst["tensor"] and worst["relative"] > 100 * answer["tolerance"]
    return worst


def test_a_partial_sum_that_is_not_reduced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorSharding, "reduce_partial", lambda self, y, **dims: y)
    failure(on(2, operators=INNER | {"blocks.*.mlp.up": "((1,1),(1,2))"}, layers=1))


def test_a_partial_gradient_that_is_not_reduced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorSharding, "partial_layout", OperatorSharding.layout)
    failure(on(2, operators={"blocks.*.mlp.up": "((1,1),(1,2))"}, layers=1))


def test_a_missing_redistribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that should shard the sequences all take the first shard."""
    original = OperatorSharding.to_local

    def to_local(self: OperatorSharding, x: Tensor, **dims: Any) -> Tensor:
        local = original(self, x, **dims)
        return x[: len(local)] if type(x) is Tensor and "rows" in self.placement else local

    monkeypatch.setattr(OperatorSharding, "to_local", to_local)
    failure(on(2, operators={"blocks.*.mlp.up": "((2,1),(1,1))"}, layers=1))


def test_a_bias_added_on_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: LinearOperator, x: Tensor) -> Tensor:
        y = F.linear(
            self.sharding.to_local(x, rows=0, inner=-1), self.module.weight, self.module.bias
        )
        return self.sharding.to_global(
            self.sharding.reduce_partial(y, rows=0, columns=-1), rows=0, columns=-1
        )

    monkeypatch.setattr(LinearOperator, "__call__", call)
    failure(on(2, operators=megatron(2, GPT), shape=GPT, layers=1))


def test_gradients_not_summed_over_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        apply_strategy,
        "operator_reduction_axes",
        lambda names, placements, mesh: dict.fromkeys(names, ()),
    )
    failure(on(2, operators={"blocks.*.mlp.up": "((2,1),(1,1))"}, layers=1))


@pytest.mark.parametrize(
    ("operators", "field", "said"),
    [
        (
            {"blocks.*.mlp.upp": "((1,1),(1,2))"},
            "blocks.*.mlp.upp",
            "names no operator of the model; did you mean blocks.*.mlp.up",
        ),
        (
            {"blocks.*.mlp.up": "((1,1),(1,4))"},
            "blocks.*.mlp.up",
            "make 4 parts for strategy.tensor.size = 2; legal",
        ),
        ({"blocks.*.mlp.up": "((4,1),(1,1))"}, "blocks.*.mlp.up", "splits rows into 4 pieces"),
        (
            {"blocks.*.attention.q": "((1,1),(1,4))"},
            "blocks.*.attention.q",
            "splits columns into 4 pieces",
        ),
        ({"blocks.*.mlp.up": "((1,2),(1,1))"}, "blocks.*.mlp.up", "splits inner in two ways"),
        (
            {"blocks.*.mlp.up": "((1,2),)"},
            "blocks.*.mlp.up",
            "inputs of a MatMul are (rows, inner), (inner, columns)",
        ),
        (
            {"*.mlp.up": "((1,1),(1,2))", "blocks.1.mlp.*": "((1,1),(1,1))"},
            "blocks.1.mlp.*",
            "one strategy a module",
        ),
        ({"final_norm": "((1,2),(2,))"}, "final_norm", "splits hidden into 2 pieces"),
        ({"blocks.*.mlp.up": "columns"}, "blocks.*.mlp.up", "legal: a tuple of tuples"),
    ],
)
def test_strategies_that_cannot_run_are_refused(
    operators: dict[str, str], field: str, said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        require(on(2, operators=operators, layers=2).resolve(), "run")
    assert any(
        p.field == f"strategy.operators.{field}" and said in p.message
        for p in refused.value.problems
    ), refused


@pytest.mark.parametrize(
    ("changes", "field"), [({"strategy.tensor.sequence": True}, "strategy.tensor.sequence")]
)
def test_choices_that_exclude_operators_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError, match=field):
        require(on(2, operators=megatron(2), changes=changes).resolve(), "run")


def test_a_tied_weight_cut_in_two_ways_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"strategy.operators.head: splits the weight that it shares"
    ):
        require(on(2, operators={"head": "((1,1),(1,2))"}, tied=True).resolve(), "run")
