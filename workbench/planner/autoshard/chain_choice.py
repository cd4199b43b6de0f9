"""Exact choice on a chain, by dynamic programming: linear in its length (OptCNN, 1802.04924)."""

from __future__ import annotations

import numpy as np

from workbench.planner.autoshard.choice_problem import StrategyProblem


def solve_by_dynamic_programming(problem: StrategyProblem) -> tuple[int, ...]:
    """The options that cost least. The problem must be a chain without a memory limit."""
    assert problem.is_chain and problem.limit is None, (
        "dynamic programming takes chains without a limit"
    )
    best, came = problem.costs[0], []
    for edge, cost in zip(problem.edges, problem.costs[1:]):
        through = best[:, None] + edge.costs
        came.append(through.argmin(axis=0))
        best = through.min(axis=0) + cost
    picked = [int(np.argmin(best))]
    for back in reversed(came):
        picked.append(int(back[picked[-1]]))
    return tuple(reversed(picked))
