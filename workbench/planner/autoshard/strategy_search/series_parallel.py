"""Exact choice by dynamic programming: nodes with one or two neighbors are eliminated one by one
(OptCNN, arXiv:1802.04924, section 5; the series and parallel reductions of Tofu, arXiv:1807.08887).

A node between two others becomes an edge between them, whose table is the min-plus product of its
tables; parallel edges add up. A series-parallel graph, such as a transformer's, is left with
nothing. What is left of another graph is solved for each option of a few of its nodes, or by the
integer program.

Nodes that are not neighbors are eliminated in rounds, those of most options first. Layers that are
alike then have equal tables in every round, whose product is made once: a chain of equal layers
takes a product for each time that its length is halved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.integer_program import solve_by_integer_programming
from workbench.planner.autoshard.strategy_search.shared_arrays import Array, SharedArrays

MAX_CONDITIONS = 2048
"""Combinations of options that are tried one by one; beyond, the integer program is faster."""
MAX_BROADCAST = 1 << 20
"""Elements of a min-plus product that are held at once."""

Graph = dict[int, dict[int, Array]]
"""Node -> neighbor -> table, [options of the node, options of the neighbor]."""


@dataclass
class _Elimination:
    """A choice on its way to nothing, and the steps back."""

    costs: dict[int, Array]
    tables: Graph
    steps: list[tuple[int, Array, dict[int, Array]]] = field(default_factory=list)
    shared: SharedArrays = field(default_factory=SharedArrays)

    def run(self) -> None:
        """Eliminate nodes with at most two neighbors while there are any."""
        ready = {node for node, near in self.tables.items() if len(near) <= 2}
        while ready:
            later: set[int] = set()
            for node in sorted(ready, key=lambda node: (-len(self.costs[node]), node)):
                if node not in later and len(self.tables[node]) <= 2:
                    later |= self._eliminate(node)
                    ready.discard(node)
            ready = {node for node in ready | later if len(self.tables[node]) <= 2}

    def _eliminate(self, node: int) -> set[int]:
        """One node; returns its neighbors."""
        cost, near = self.costs.pop(node), self.tables.pop(node)
        self.steps.append((node, cost, near))
        for other in near:
            del self.tables[other][node]
        if len(near) == 1:
            ((other, table),) = near.items()
            self.costs[other] = self.shared.once(_plus_least, self.costs[other], cost, table)
        elif near:
            (a, left), (b, right) = sorted(near.items())
            self.connect(a, b, self.shared.once(_min_plus, left, cost, right))
        return {*near}

    def connect(self, a: int, b: int, table: Array) -> None:
        """Add a table, [options of a, options of b], to the edge between them."""
        if b in self.tables[a]:
            table = self.shared.once(np.add, self.tables[a][b], table)
        self.tables[a][b], self.tables[b][a] = table, self.shared.once(np.transpose, table)

    def fix(self, node: int, option: int) -> None:
        """Give a node one option; its edges become costs of its neighbors."""
        for other, table in self.tables.pop(node).items():
            self.costs[other] = self.costs[other] + table[option]
            del self.tables[other][node]
        self.steps.append((node, self.costs.pop(node)[[option]], {}))

    def copy(self) -> _Elimination:
        """What is left, without the steps."""
        tables = {node: dict(near) for node, near in self.tables.items()}
        return _Elimination(dict(self.costs), tables)

    def picked(self, known: dict[int, int]) -> dict[int, int]:
        """The option of each eliminated node, given those of the nodes that were left."""
        found = dict(known)
        for node, cost, near in reversed(self.steps):
            options = tuple(found[other] for other in near)
            found[node] = self.shared.once(_least, cost, *near.values(), fixed=options)
        return found


def solve_by_dynamic_programming(problem: StrategyProblem) -> tuple[int, ...]:
    """The options that cost least without regard to memory, in time linear in a series-parallel
    graph.

    Args:
        problem: Any graph; its limit is not read.

    Returns:
        The option of each node.
    """
    tables: Graph = {node: {} for node in range(len(problem.node_costs))}
    whole = _Elimination(dict(enumerate(problem.node_costs)), tables)
    for edge in problem.edges:
        if edge.source == edge.target:
            whole.costs[edge.source] = whole.costs[edge.source] + np.diagonal(edge.costs)
        else:
            whole.connect(edge.source, edge.target, edge.costs)
    found = _solve(whole)
    return tuple(found[node] for node in range(len(problem.node_costs)))


def _solve(graph: _Elimination) -> dict[int, int]:
    graph.run()
    if not graph.tables:
        return graph.picked({})
    conditions = _conditions(graph)
    if math.prod(len(graph.costs[node]) for node in conditions) > MAX_CONDITIONS:
        return graph.picked(_by_integer_programming(graph))
    return graph.picked(_by_conditions(graph, conditions[0]))


def _conditions(graph: _Elimination) -> list[int]:
    """Nodes whose options have to be tried until the rest can be eliminated."""
    near = {node: set(others) for node, others in graph.tables.items()}
    found = []
    while near:
        node = min(near, key=lambda n: math.log(len(graph.costs[n])) / len(near[n]))
        found.append(node)
        _drop(near, node)
        while (
            low := next((n for n, others in near.items() if len(others) <= 2), None)
        ) is not None:
            _drop(near, low, join=True)
    return found


def _drop(near: dict[int, set[int]], node: int, join: bool = False) -> None:
    others = near.pop(node)
    for other in others:
        near[other].discard(node)
        if join:
            near[other] |= others - {other}


def _by_conditions(graph: _Elimination, node: int) -> dict[int, int]:
    tried = []
    for option in range(len(graph.costs[node])):
        own = graph.copy()
        own.fix(node, option)
        tried.append(_solve(own) | {node: option})
    return min(tried, key=lambda found: _cost(graph, found))


def _cost(graph: _Elimination, found: dict[int, int]) -> float:
    own = sum(float(cost[found[node]]) for node, cost in graph.costs.items())
    pairs = ((a, b, t) for a, near in graph.tables.items() for b, t in near.items() if a < b)
    return own + sum(float(table[found[a], found[b]]) for a, b, table in pairs)


def _by_integer_programming(graph: _Elimination) -> dict[int, int]:
    at = {node: i for i, node in enumerate(graph.costs)}
    edges = (
        ReshardingEdge(at[a], at[b], table)
        for a, near in graph.tables.items()
        for b, table in near.items()
        if a < b
    )
    left = StrategyProblem(tuple(graph.costs.values()), tuple(edges))
    return dict(zip(at, solve_by_integer_programming(left)))


def _min_plus(left: Array, cost: Array, right: Array) -> Array:
    """min over b of left[b, a] + cost[b] + right[b, c]."""
    first = left.T + cost
    if first.size * right.shape[1] <= MAX_BROADCAST:
        product: Array = (first[:, :, None] + right[None]).min(axis=1)
        return product
    return np.stack([(row[:, None] + right).min(axis=0) for row in first])


def _plus_least(own: Array, cost: Array, table: Array) -> Array:
    """own[a] + min over b of cost[b] + table[b, a]."""
    found: Array = own + (cost[:, None] + table).min(axis=0)
    return found


def _least(cost: Array, *tables_and_options: Any) -> int:
    """The option that costs least, given those of the neighbors."""
    *tables, options = tables_and_options
    return int(np.argmin(cost + sum((t[:, o] for t, o in zip(tables, options)), 0.0)))
