"""Exact choice of operator strategies on any graph, within a memory limit, by integer linear
programming (Alpa, arXiv:2201.12023, section 4).

In the integer program a binary x[node, option] picks options. An edge's cost, a product of two
binaries, is linear in e[a, b], which equals x[source, a] x[target, b] once its rows add up to
x[source] and its columns to x[target].
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.shared_arrays import Array

Triplets = tuple[NDArray[np.int64], NDArray[np.int64], Array]
SCALE = 1e4
"""What costs are scaled to: the solver stops within 1e-6 of the optimum, in absolute terms."""


def solve_by_integer_programming(problem: StrategyProblem) -> tuple[int, ...]:
    """The options that cost least within the memory limit.

    Args:
        problem: Any graph; some options must be within its limit.

    Returns:
        The option of each node.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to import
    from scipy.sparse import coo_array

    starts = np.cumsum([0, *(len(cost) for cost in problem.node_costs)])
    rows, columns, values, rhs, objective = _equations(problem, starts)
    shape = (len(rhs), len(objective))
    constraints: list[Any] = [
        LinearConstraint(coo_array((values, (rows, columns)), shape=shape).tocsr(), rhs, rhs)
    ]
    if problem.memory_limit is not None:
        padded = np.concatenate([*problem.node_bytes, np.zeros(len(objective) - starts[-1])])
        constraints.append(LinearConstraint(padded[None, :] / problem.memory_limit, ub=1.0))
    integral = np.arange(len(objective)) < starts[-1]
    legal = np.isfinite(objective)
    objective = np.where(legal, objective, 0.0)
    scale = SCALE / max(float(np.abs(objective).max()), 1e-300)
    solution = milp(
        objective * scale,
        integrality=integral,
        bounds=Bounds(0.0, legal.astype(float)),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    assert solution.x is not None, f"the solver says: {solution.message}"
    return tuple(int(np.argmax(solution.x[a:b])) for a, b in pairwise(starts))


def _equations(
    problem: StrategyProblem, starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array, Array, Array]:
    """Equations as sparse triplets, their right sides, and the objective over all variables."""
    parts: list[Triplets] = []
    for node, cost in enumerate(problem.node_costs):
        options = np.arange(len(cost))
        parts.append((np.full(len(cost), node), starts[node] + options, np.ones(len(cost))))
    objective, rhs = list(problem.node_costs), [1.0] * len(problem.node_costs)
    variables = int(starts[-1])
    for edge in problem.edges:
        triplets, costs, equations = _edge(edge, starts, len(rhs), variables)
        parts.append(triplets)
        objective.append(costs)
        rhs += [0.0] * equations
        variables += len(costs)
    rows, columns, values = (np.concatenate(part) for part in zip(*parts))
    return rows, columns, values, np.array(rhs), np.concatenate(objective)


def _edge(
    edge: ReshardingEdge, starts: NDArray[np.int64], row: int, variable: int
) -> tuple[Triplets, Array, int]:
    """One edge: equations from `row`, variables from `variable`. Options that cost the same
    everywhere share one.
    """
    kinds, source = np.unique(edge.costs, axis=0, return_inverse=True)
    kinds, target = np.unique(kinds, axis=1, return_inverse=True)
    a, b = (index.ravel() for index in np.indices(kinds.shape))
    own = variable + np.arange(kinds.size)
    source, target = source.ravel(), target.ravel()
    rows = np.concatenate(
        [row + a, row + kinds.shape[0] + b, row + source, row + kinds.shape[0] + target]
    )
    xs = [
        starts[edge.source] + np.arange(len(source)),
        starts[edge.target] + np.arange(len(target)),
    ]
    values = np.concatenate([np.ones(2 * kinds.size), -np.ones(len(source) + len(target))])
    return (rows, np.concatenate([own, own, *xs]), values), kinds.ravel(), sum(kinds.shape)
