"""Why each operator has its strategy, in a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workbench.planner.autoshard.graph_pricing import PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.strategy_search.propagation import neighbors, redistribution_only
from workbench.units import seconds_text

PINNED = "pinned by you"
NOTHING = "replicated: nothing reaches it"


def searched_reasons(num_operators: int, pinned: Mapping[int, ShardingStrategy]) -> list[str]:
    """Of a search for the least time."""
    return [PINNED if i in pinned else "least time" for i in range(num_operators)]


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
    found = []
    for i in range(len(picked)):
        if i in pinned:
            found.append(PINNED)
        elif distance[i] is None:
            found.append(NOTHING)
        else:
            found.append(_propagated(priced, picked, i, distance))
    return found


def _propagated(
    priced: PricedGraph, picked: tuple[int, ...], here: int, distance: Sequence[int | None]
) -> str:
    names = [operator.name for operator in priced.graph.operators]
    agreeing, differing = _sides(priced, picked, here)
    first = min(agreeing, key=lambda n: (_far(distance[n]), n), default=None)
    if differing:
        other = min(differing, key=lambda n: (_far(distance[n]), n))
        more = _alternative(priced, picked, here, other)
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


def _sides(priced: PricedGraph, picked: tuple[int, ...], here: int) -> tuple[set[int], set[int]]:
    """Neighbors whose tensors pass as they are, and those with a redistribution between."""
    agreeing: set[int] = set()
    differing: set[int] = set()
    for there, edge in neighbors(priced.graph)[here]:
        (agreeing if priced.is_aligned(edge, picked) else differing).add(there)
    return agreeing - differing, differing


def _alternative(
    priced: PricedGraph, picked: tuple[int, ...], here: int, other: int
) -> float | None:
    """Seconds of redistribution that it would cost to take the layout of `other`, the rest as it
    is; None where it cannot.
    """
    total = np.zeros(len(priced.options[here]))
    between = np.zeros(len(priced.options[here]))
    for edge in redistribution_only(priced).edges:
        if here in (edge.source, edge.target) and edge.source != edge.target:
            there = edge.target if here == edge.source else edge.source
            costs = edge.costs if here == edge.source else edge.costs.T
            total = total + costs[:, picked[there]]
            between = between + (costs[:, picked[there]] if there == other else 0.0)
    agreeing = np.flatnonzero(between == 0.0)
    if not len(agreeing):
        return None
    return float(total[agreeing].min() - total[picked[here]])
