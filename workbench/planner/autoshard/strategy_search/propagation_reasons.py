"""Why each operator has its strategy, in a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.plan.operators.operator_graph import TensorEdge
from workbench.planner.autoshard.choice_result import LEAST_TIME, NOTHING, PINNED, SHARED
from workbench.planner.autoshard.graph_pricing import PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.strategy_search.choice_problem import ReshardingEdge
from workbench.planner.autoshard.strategy_search.propagation import neighbors, redistribution_only
from workbench.units import seconds_text


def searched_reasons(
    num_operators: int,
    named: Mapping[int, ShardingStrategy],
    pinned: Mapping[int, ShardingStrategy],
) -> list[str]:
    """Reasons in a search for the least time, beside the `named` operators and all that these have
    `pinned`.
    """
    others = [SHARED if i in pinned else LEAST_TIME for i in range(num_operators)]
    return [PINNED if i in named else reason for i, reason in enumerate(others)]


def propagated_reasons(
    priced: PricedGraph,
    picked: tuple[int, ...],
    pinned: Mapping[int, ShardingStrategy],
    distance: Sequence[int | None],
) -> list[str]:
    """Of propagation: where each layout came from, and what the other layout would have cost.

    Args:
        priced: The graph, with the options that reached each operator.
        picked: The chosen option of each operator.
        pinned: Operator -> the strategy that the user gave.
        distance: Tensors between each operator and a pinned one; None: nothing reaches it.
    """
    found: list[str] = []
    between, around = redistribution_only(priced).edges, neighbors(priced.graph)
    for i in range(len(picked)):
        if i in pinned:
            found.append(PINNED)
        elif distance[i] is None and not _splits(priced, picked, i):
            found.append(NOTHING)
        else:
            found.append(_propagated(priced, picked, i, distance, between, around[i]))
    return found


def _propagated(
    priced: PricedGraph,
    picked: tuple[int, ...],
    here: int,
    distance: Sequence[int | None],
    between: Sequence[ReshardingEdge],
    around: Sequence[tuple[int, TensorEdge]],
) -> str:
    names = [operator.name for operator in priced.graph.operators]
    agreeing, differing = _sides(priced, picked, around)
    first = min(agreeing, key=lambda n: (_far(distance[n]), n), default=None)
    if differing:
        other = min(differing, key=lambda n: (_far(distance[n]), n))
        more = _alternative(priced, between, picked, here, other)
        if first is not None and more is not None:
            return (
                f"conflict between {names[first]} and {names[other]}: {names[other]}'s layout "
                f"costs {seconds_text(more)} more (estimated)"
            )
    splits = _splits(priced, picked, here)
    if first is None:
        return f"least redistribution by {splits}" if splits else "least redistribution"
    return f"from {names[first]} by {splits}" if splits else f"replicated, as {names[first]}"


def _far(distance: int | None) -> float:
    return np.inf if distance is None else distance


def _splits(priced: PricedGraph, picked: tuple[int, ...], here: int) -> str:
    placement = priced.options[here][picked[here]].placement
    return " and ".join(dict.fromkeys(name for name in placement if name is not None))


def _sides(
    priced: PricedGraph, picked: tuple[int, ...], around: Sequence[tuple[int, TensorEdge]]
) -> tuple[set[int], set[int]]:
    """Neighbors whose tensors pass as they are, and those with a redistribution between."""
    agreeing: set[int] = set()
    differing: set[int] = set()
    for there, edge in around:
        (agreeing if priced.is_aligned(edge, picked) else differing).add(there)
    return agreeing - differing, differing


def _alternative(
    priced: PricedGraph,
    between: Sequence[ReshardingEdge],
    picked: tuple[int, ...],
    here: int,
    other: int,
) -> float | None:
    """Seconds of redistribution that it would cost to take the layout of `other`, the rest as it
    is; None where it cannot.
    """
    total = np.zeros(len(priced.options[here]))
    for edge in between:
        if edge.source != edge.target and here in (edge.source, edge.target):
            total = total + _own(edge.costs, edge, here, picked)
    agrees = np.full(total.shape, True)
    for tensor, table in zip(priced.graph.edges, priced.tables):
        if {tensor.source, tensor.target} == {here, other}:
            agrees = agrees & _own(table.aligned, tensor, here, picked)
    return float(total[agrees].min() - total[picked[here]]) if agrees.any() else None


def _own(
    table: NDArray[Any], edge: ReshardingEdge | TensorEdge, here: int, picked: tuple[int, ...]
) -> NDArray[Any]:
    """What an edge's table has for each option of the end `here`."""
    at_source = here == edge.source
    return table[:, picked[edge.target]] if at_source else table[picked[edge.source]]
