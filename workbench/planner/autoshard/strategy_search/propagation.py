"""Strategies from a few that the user pins, as MindSpore's `sharding_propagation` and GSPMD
(arXiv:2105.04663): layouts flow along tensors, forward and backward.

A split reaches an operator where a tensor that it reads or writes has the dimension that a neighbor
splits. Among the layouts that reach it, an operator takes those of least redistribution over the
graph, of equals the one of least time of its own; what nothing reaches stays replicated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from workbench.plan.operators.operator_graph import OperatorGraph, TensorEdge
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming
from workbench.planner.autoshard.strategy_search.shared_arrays import Array

Split = tuple[int, str]
"""A mesh axis and the dimension that it splits."""
OWN_TIME = 1e-6
"""Weight of operators' own seconds beside those of redistribution: they decide between equals."""


def propagate(
    graph: OperatorGraph, pricing: GraphPricing, pinned: Mapping[int, ShardingStrategy]
) -> tuple[PricedGraph, tuple[int, ...], list[int | None]]:
    """The graph with the options that reach each operator priced, those picked, and each operator's
    distance from a pinned one, None where nothing reaches it.

    Args:
        graph: Operators and the tensors between them.
        pricing: What they cost on a mesh.
        pinned: Operator -> the strategy that it keeps.
    """
    reached, distance = _reach(graph, pricing, pinned)
    options = [
        (pinned[i],) if i in pinned else _made_of(reached[i], pricing.options(operator))
        for i, operator in enumerate(graph.operators)
    ]
    priced = pricing.price(graph, options)
    while True:
        picked = solve_by_dynamic_programming(redistribution_only(priced))
        if not priced.refine(picked):
            return priced, picked, distance


def redistribution_only(priced: PricedGraph) -> StrategyProblem:
    """The choice of least redistribution: what sums take in any case is left out."""
    problem = priced.bounded()
    beyond: dict[tuple[int, int], Array] = {}
    for edge, table in zip(priced.graph.edges, priced.tables):
        pair, costs = (edge.source, edge.target), edge.num_layers * table.redistribution()
        beyond[pair] = beyond[pair] + costs if pair in beyond else costs
    edges = tuple(ReshardingEdge(*pair, costs) for pair, costs in beyond.items())
    return replace(
        problem, edges=edges, node_costs=tuple(OWN_TIME * cost for cost in problem.node_costs)
    )


def _made_of(
    splits: set[Split], options: tuple[ShardingStrategy, ...]
) -> tuple[ShardingStrategy, ...]:
    return tuple(option for option in options if option.splits <= splits)


def _reach(
    graph: OperatorGraph, pricing: GraphPricing, pinned: Mapping[int, ShardingStrategy]
) -> tuple[list[set[Split]], list[int | None]]:
    """Splits that reach each operator, and over how many tensors the first of them came."""
    splits: list[set[Split]] = [set() for _ in graph.operators]
    distance: list[int | None] = [0 if i in pinned else None for i in range(len(splits))]
    waiting = deque(pinned)
    for i, strategy in pinned.items():
        splits[i] = strategy.splits
    around = neighbors(graph)
    while waiting:
        here = waiting.popleft()
        for there, edge in around[here]:
            arriving = {*_across(edge, here, splits[here], graph, pricing)} - splits[there]
            if arriving and there not in pinned:
                splits[there] |= arriving
                if distance[there] is None:
                    distance[there] = (distance[here] or 0) + 1
                waiting.append(there)
    return splits, distance


def neighbors(graph: OperatorGraph) -> list[list[tuple[int, TensorEdge]]]:
    """Of each operator: the others that share a tensor with it, and the edge."""
    found: list[list[tuple[int, TensorEdge]]] = [[] for _ in graph.operators]
    for edge in graph.edges:
        if edge.source != edge.target:
            found[edge.source].append((edge.target, edge))
            found[edge.target].append((edge.source, edge))
    return found


def _across(
    edge: TensorEdge, here: int, splits: set[Split], graph: OperatorGraph, pricing: GraphPricing
) -> Iterator[Split]:
    """What the splits of one end are at the other, where it can be split so."""
    own, other = edge.source_tensor.dims, edge.target_tensor.dims
    there = edge.target
    if here == edge.target:
        own, other, there = other, own, edge.source
    for axis, name in splits:
        if name in own:
            arriving = other[own.index(name)]
            dims = {dim.name: dim.units for dim in graph.operators[there].dims}
            if dims.get(arriving, 1) % pricing.mesh.axes[axis].size == 0:
                yield axis, arriving
