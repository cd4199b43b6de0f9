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
from workbench.plan.operators.strategy_form import Form
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
            (_under(pinned[i].form, operator, own),)
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
    """The strategy that splits each dimension over so many axes, or over fewer where that is
    illegal here; and those that give one more axis to one dimension.
    """
    options = [(one, _axes(one, operator)) for one in pricing.options(operator)]
    more = [one for one, own in options if _steps(axes, own) == [1]]
    kept = [one for one, own in options if all(a <= b for a, b in zip(own, axes))]
    return (max(kept, key=lambda one: one.num_axes), *more)


def _steps(before: Axes, after: Axes) -> list[int]:
    return [b - a for a, b in zip(before, after) if a != b]


def _under(form: Form, operator: Operator, pricing: GraphPricing) -> ShardingStrategy:
    """The strategy that comes nearest to `form` on this mesh."""
    return max(
        (one for one in pricing.options(operator) if _divides(one.form, form)),
        key=lambda one: one.num_axes,
    )


def _divides(small: Form, large: Form) -> bool:
    pairs = zip((n for part in small for n in part), (n for part in large for n in part))
    return all(b % a == 0 for a, b in pairs)
