"""The exact choice within a memory limit: by a price of memory where that is exact, else by the
integer program.

With a price of memory (a Lagrange multiplier) dynamic programming finds a choice, and a bound that
no choice within the limit can beat. The price whose choices lie on both sides of the limit gives
the best bound; a choice that meets it is the optimum.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from workbench.errors import PlanError, Problem
from workbench.planner.autoshard.strategy_search.choice_problem import Priced, StrategyProblem
from workbench.planner.autoshard.strategy_search.integer_program import solve_by_integer_programming
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming
from workbench.planner.autoshard.strategy_search.shared_arrays import Array, SharedArrays
from workbench.units import GIB

MAX_PAIRS = 100_000
"""Pairs of options over all edges that the integer program is given: it answers in seconds."""
PRECISION = 1e-9
"""Relative difference from the bound at which a choice counts as the optimum."""
Picked = tuple[int, ...]


class MemoryRefusal(PlanError):
    """No choice is within the limit.

    Attributes:
        least: Bytes within which one would be.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(Problem("--memory", message))
        self.least = least


def least_time(choice: Priced, seconds_per_byte: float = 0.0) -> Picked:
    """The options that cost least, whatever memory they take.

    A choice of least bounds whose prices are all known is the optimum: no other pair is priced.

    Args:
        choice: What is chosen.
        seconds_per_byte: What memory costs.
    """
    while True:
        picked = solve_by_dynamic_programming(choice.bounded().weighted(seconds_per_byte))
        if not choice.refine(picked):
            return picked


def solve_within_memory(choice: Priced, exact: bool = True) -> tuple[Picked, str]:
    """The options that cost least within the problem's limit, and what found them.

    Args:
        choice: With a limit.
        exact: Whether the integer program, which may take long, closes the gap to the bound.

    Raises:
        PlanError: No choice is within the limit.
    """
    free = least_time(choice)
    if choice.bounded().fits(free):
        return free, "dynamic programming"
    within, bound = _by_price(choice, free, least_memory(choice.bounded()))
    problem = choice.bounded()
    cost = problem.total_cost(within)
    if cost <= bound * (1 + PRECISION):
        return within, "dynamic programming with a price of memory"
    if exact and sum(edge.costs.size for edge in problem.edges) <= MAX_PAIRS:
        return _by_integer_programming(choice), "integer programming"
    gap = f"within {cost / bound - 1:.2%} of the least"
    return within, f"dynamic programming with a price of memory, {gap}"


def least_memory(problem: StrategyProblem) -> Picked:
    """The options that take the least memory. Raises `PlanError` where the limit forbids them."""
    shared = SharedArrays()
    edges = (replace(edge, costs=shared.once(_legality, edge.costs)) for edge in problem.edges)
    picked = solve_by_dynamic_programming(StrategyProblem(problem.node_bytes, tuple(edges)))
    if not problem.fits(picked):
        raise too_little_memory(problem.memory_limit or 0.0, problem.total_bytes(picked))
    return picked


def _legality(costs: Array) -> Array:
    """0, or inf where options are illegal together."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def too_little_memory(limit: float, least: float, beside: str = "") -> MemoryRefusal:
    """The refusal of a limit, bytes, where the least choice that is found takes `least`.

    Args:
        limit: Bytes of a rank.
        least: Likewise.
        beside: What the plan has besides, and what else is known, in words.
    """
    said = f"{_rounded_up(least / GIB):.4g} GiB"
    return MemoryRefusal(
        f"is {limit / GIB:.4g} GiB a rank, but the least that was found takes {said} (estimated)"
        f"{beside}; legal: {said} or more, more ranks, or fewer tokens",
        least,
    )


def _rounded_up(value: float, digits: int = 4) -> float:
    """A number that is legal where `value` is, of so many significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / unit) * unit


def _by_integer_programming(choice: Priced) -> Picked:
    while True:
        picked = solve_by_integer_programming(choice.bounded())
        if not choice.refine(picked):
            return picked


def _by_price(choice: Priced, over: Picked, within: Picked) -> tuple[Picked, float]:
    """A choice within the limit, and a bound on every such choice.

    Args:
        choice: With a limit.
        over: The choice of least cost, which the limit forbids.
        within: A choice that it allows.
    """
    choice.refine(within)
    limit, best = choice.bounded().memory_limit or 0.0, within
    while True:
        problem = choice.bounded()
        spent = problem.total_cost(within) - problem.total_cost(over)
        price = spent / (problem.total_bytes(over) - problem.total_bytes(within))
        found = least_time(choice, price)
        problem = choice.bounded()
        priced = problem.weighted(price)
        bound = priced.total_cost(found) - price * limit
        if problem.fits(found):
            best = min(best, found, key=problem.total_cost)
        if priced.total_cost(found) >= priced.total_cost(within) * (1 - PRECISION):
            return best, bound
        over, within = (over, found) if problem.fits(found) else (found, within)
