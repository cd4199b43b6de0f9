"""Fast choice for large graphs: all operators are split along one mesh axis at a time, after the
Double Recursive Strategy Search of MindSpore's automatic parallelism (`recursive_programming`).

At each step the ranks are those of one more axis, the outermost first, and every operator gives one
more axis to one of its dimensions or to none, which together costs least given the steps before. A
step has few options whatever the number of ranks, and is solved exactly in time linear in the
operators; that steps do not foresee later ones is what it gives up.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.plan.operators.operator_graph import Operator, OperatorGraph
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.strategy_search.memory_limit import least_time

Axes = tuple[int, ...]
"""Mesh axes over which each dimension of an operator is split."""


def choose_recursively(
    graph: OperatorGraph,
    pricing: GraphPricing,
    pinned: Mapping[int, ShardingStrategy],
    seconds_per_byte: float = 0.0,
) -> tuple[PricedGraph, tuple[int, ...]]:
    """The graph with the options of the last step priced, and those picked.

    Args:
        graph: Operators and the tensors between them.
        pricing: What they cost on a mesh.
        pinned: Operator -> the strategy that it keeps.
        seconds_per_byte: What memory costs; 0: nothing.
    """
    axes: list[Axes] = [(0,) * len(operator.dims) for operator in graph.operators]
    for count in range(1, max(1, len(pricing.mesh.axes)) + 1):
        own = pricing if count >= len(pricing.mesh.axes) else pricing.outermost(count)
        options = [
            (_under(pinned[i], operator, pricing, own),)
            if i in pinned
            else _next(axes[i], operator, own)
            for i, operator in enumerate(graph.operators)
        ]
        priced = own.price(graph, options)
        picked = least_time(priced, seconds_per_byte)
        axes = [
            _axes(found[option], operator)
            for found, option, operator in zip(options, picked, graph.operators)
        ]
    return priced.narrowed(picked), (0,) * len(picked)


def _axes(strategy: ShardingStrategy, operator: Operator) -> Axes:
    return tuple(strategy.placement.count(dim.name) for dim in operator.dims)


def _next(axes: Axes, operator: Operator, pricing: GraphPricing) -> tuple[ShardingStrategy, ...]:
    """The strategies that split each dimension over so many axes, or over fewer where that is
    illegal here; and those that give one more axis to one dimension.
    """
    options = [(one, _axes(one, operator)) for one in pricing.options(operator)]
    more = [one for one, own in options if _steps(axes, own) == [1]]
    kept = [one for one, own in options if all(a <= b for a, b in zip(own, axes))]
    most = max(one.num_axes for one in kept)
    return (*(one for one in kept if one.num_axes == most), *more)


def _steps(before: Axes, after: Axes) -> list[int]:
    return [b - a for a, b in zip(before, after) if a != b]


def _under(
    pinned: ShardingStrategy, operator: Operator, whole: GraphPricing, own: GraphPricing
) -> ShardingStrategy:
    """The strategy that comes nearest to the pinned one of the `whole` mesh on the `own`."""

    def divides(one: ShardingStrategy) -> bool:
        return all(
            pinned.num_shards(dim.name, whole.mesh) % one.num_shards(dim.name, own.mesh) == 0
            for dim in operator.dims
        )

    def nearness(one: ShardingStrategy) -> tuple[int, bool]:
        return one.num_axes, (one.output is None) == (pinned.output is None)

    return max(filter(divides, own.options(operator)), key=nearness)
