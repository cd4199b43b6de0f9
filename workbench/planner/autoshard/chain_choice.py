"""Exact choice on a chain, by dynamic programming (OptCNN, arXiv:1802.04924)."""

from __future__ import annotations

import numpy as np

from workbench.planner.autoshard.choice_problem import StrategyProblem


def solve_by_dynamic_programming(problem: StrategyProblem) -> tuple[int, ...]:
    """The options that cost least; time is linear in the length of the chain.

    Args:
        problem: A chain without a memory limit.

    Returns:
        The option of each node.
    """
    assert problem.is_chain and problem.memory_limit is None, (
        "dynamic programming takes chains without a limit"
    )
    # least[o]: seconds of the best choice up to this node, if this node takes option o.
    least, best_sources = problem.node_costs[0], []
    for edge, cost in zip(problem.edges, problem.node_costs[1:]):
        through = least[:, None] + edge.costs
        best_sources.append(through.argmin(axis=0))
        least = through.min(axis=0) + cost
    picked = [int(np.argmin(least))]
    for sources in reversed(best_sources):
        picked.append(int(sources[picked[-1]]))
    return tuple(reversed(picked))
