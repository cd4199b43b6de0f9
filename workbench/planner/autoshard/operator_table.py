"""The chosen strategies as a table of operators and redistributions."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.operators.operator_graph import Operator, TensorEdge
from workbench.plan.operators.strategy_form import strategy_text
from workbench.planner.autoshard.choice_reasons import explain_choice
from workbench.planner.autoshard.choice_result import OperatorPlan, OperatorRow, Redistribution
from workbench.planner.autoshard.graph_pricing import PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy


@dataclass(frozen=True)
class Choice:
    """An option of each operator of a priced graph."""

    priced: PricedGraph
    picked: tuple[int, ...]
    solver: str
    reasons: tuple[str, ...]
    """Why each operator has its strategy."""


def operator_plan(
    choice: Choice, mode: str, memory: float | None = None, free: Choice | None = None
) -> OperatorPlan:
    """A choice with what it costs.

    Args:
        choice: What was found.
        mode: How it was searched.
        memory: The limit, bytes of a rank.
        free: The best choice without the limit.
    """
    priced, picked = choice.priced, choice.picked
    operators, mesh = priced.graph.operators, priced.mesh
    rows = tuple(_row(priced, i, picked, choice.reasons[i]) for i in range(len(picked)))
    between = tuple(
        Redistribution(
            operators[edge.source].name,
            operators[edge.target].name,
            edge.target_tensor.name,
            moves,
            edge.num_layers,
        )
        for edge in priced.graph.edges
        if edge.source_tensor.kind != "parameter"
        and not _is_own(edge, priced, picked)
        and (moves := priced.moves(edge, picked))
    )
    return OperatorPlan(
        rows,
        between,
        tuple(axis.size for axis in mesh.axes) if mesh.grid else (mesh.ranks,),
        mode,
        choice.solver,
        priced.problem.total_cost(picked),
        priced.problem.total_bytes(picked),
        memory,
        explain_choice(priced, picked, choice.reasons, memory, _forbidden(free, memory)),
    )


def _forbidden(free: Choice | None, memory: float | None) -> tuple[float, float] | None:
    """Seconds and bytes of the best choice, where the limit forbids it."""
    if free is None or memory is None:
        return None
    problem = free.priced.problem
    size = problem.total_bytes(free.picked)
    return (problem.total_cost(free.picked), size) if size > memory else None


def _is_own(edge: TensorEdge, priced: PricedGraph, picked: tuple[int, ...]) -> bool:
    """Whether what passes along `edge` is shown with its reader: the sum of a gradient alone."""
    once = edge.num_layers == priced.graph.operators[edge.target].num_layers
    return once and priced.is_aligned(edge, picked)


def _row(priced: PricedGraph, index: int, picked: tuple[int, ...], reason: str) -> OperatorRow:
    option, operator = picked[index], priced.graph.operators[index]
    strategy, cost = priced.options[index][option], priced.costs[index][option]
    moves = cost.moves
    for edge in priced.graph.edges:
        if edge.target == index and edge.source_tensor.kind != "parameter":
            moves += priced.moves(edge, picked) if _is_own(edge, priced, picked) else ()
    return OperatorRow(
        operator.name,
        operator.kind,
        operator.modules,
        strategy_text(strategy.form),
        describe_splits(operator, strategy, priced),
        moves,
        cost.compute,
        sum(move.seconds for move in moves),
        cost.bytes,
        operator.num_layers,
        reason,
    )


def describe_splits(operator: Operator, strategy: ShardingStrategy, priced: PricedGraph) -> str:
    """A strategy in words; on a grid with the axis of each split."""
    said = []
    for dim in operator.dims:
        axes = [a for a, name in enumerate(strategy.placement) if name == dim.name]
        if (ranks := priced.mesh.ranks_over(axes)) > 1:
            where = f" (axis {' and '.join(map(str, axes))})" if priced.mesh.grid else ""
            said.append(f"{dim.name} {ranks} ways{where}")
    if strategy.output is not None:
        said.append("output by tokens")
    return ", ".join(said) or "unsharded"
