"""Operator strategies that fit a memory limit, by the estimate of the plan that has them.

The search counts parameters, states and saved activations alone. The limit that it is given
therefore is less by the rest, as the estimate of its last answer counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import refuse
from workbench.plan.operators.traced.node_factors import factor_graph
from workbench.plan.operators.traced.traced_json import TracedModel
from workbench.plan.operators.traced.traced_operators import traced_operators
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.autoshard import OperatorPlan, choose_for_plan, plan_with, searched_plan
from workbench.planner.autoshard.for_plans.memory_changes import first_that_fits
from workbench.planner.autoshard.plan_problem import PlanChoice, data_ranks, plan_choice
from workbench.planner.autoshard.strategy_search.memory_limit import (
    MemoryRefusal,
    too_little_memory,
)
from workbench.planner.memory_advice import plan_peak_bytes
from workbench.units import GIB

ATTEMPTS = 8
"""Limits that the search is given at most; mostly two or three."""
CLOSE = 0.01
"""Share of the limit that is not worth another attempt."""
ROUNDING = 1e-9
ABOVE_LEAST = (1.15, 1.05, 1 + ROUNDING)
"""Multiples of the least by the search's own count that are tried where that is all that it may
take: of these the estimate may count less for a larger one.
"""
Weighed = Callable[[float | None], OperatorPlan]
"""The search's own limit -> its answer, with the peak that the estimate of it says."""


def choose_within_memory(
    plan: Plan,
    memory: float | None,
    ranks: int | Sequence[int] | None = None,
    sequences: int | None = None,
    mode: str = "dynamic_programming",
    model: TracedModel | None = None,
) -> OperatorPlan:
    """The operator strategies of least cost whose plan fits `memory` by its estimate. Where none
    do, the plan's ZeRO stage and recompute are changed so that some do, which the answer's
    `changes` say. Code recomputes nothing.

    Args:
        plan: As written.
        memory: Bytes of a rank; None: no limit, and the reason says where a GPU has less.
        ranks: As of `choose_for_plan`, and so are the others.
        sequences: Of one microbatch.
        mode: How strategies are searched.
        model: The plan's module, where it is code, traced at `microbatch_sequences`.

    Raises:
        PlanError: No choice is legal, or none fits.
    """
    full = searched_plan(plan, ranks, sequences)
    full = full.with_fields(**{"strategy.operators": plan.strategy.operators})
    graph = None if model is None else traced_operators(factor_graph(model.graph))
    if memory is None:
        found = choose_for_plan(full, ranks, sequences, mode, graph)
        return _with_capacity(found, full.gpu.memory_gib)
    if not 1 <= memory < math.inf:
        legal = "legal: more than 0 (a byte or more), or without it, for no limit"
        raise refuse("--memory", f"is {memory / GIB:g} GiB a rank; {legal}")

    def choice(changes: Mapping[str, Any]) -> PlanChoice:
        return plan_choice(full.with_fields(**changes), ranks, sequences, mode, graph)

    fitting = _Fitting(plan, memory, choice, model)
    return first_that_fits(full, data_ranks(full, ranks), memory, fitting.search, fitting.bound)


@dataclass(frozen=True)
class _Fitting:
    """Strategies of a plan within a limit, under changes of the plan."""

    plan: Plan
    memory: float
    choice: Callable[[Mapping[str, Any]], PlanChoice]
    model: TracedModel | None
    _known: dict[tuple[tuple[str, Any], ...], PlanChoice] = field(default_factory=dict)
    """What is priced for the bound is known to the search."""

    def bound(self, changes: Mapping[str, Any]) -> float:
        """Bytes of a rank that no strategies are below."""
        return self._choice(changes).least_state_bytes()

    def search(self, changes: Mapping[str, Any]) -> OperatorPlan:
        """The fastest strategies whose peak is within the limit. Raises `PlanError`."""
        choice = self._choice(changes)

        def weighed(limit: float | None) -> OperatorPlan:
            found = replace(choice.within(limit), limit=self.memory, changes=dict(changes))
            peak = plan_peak_bytes(plan_with(self.plan, found).resolve(), self.model)
            return replace(found, peak=float(peak))

        said = " and ".join(f"{name}: {value}" for name, value in changes.items())
        beside = f" with {said}" if said else ""
        return _that_fits(weighed, self.memory, beside + self._least_gpus(choice.plan))

    def _choice(self, changes: Mapping[str, Any]) -> PlanChoice:
        key = tuple(changes.items())
        if key not in self._known:
            self._known[key] = self.choice(changes)
        return self._known[key]

    def _least_gpus(self, plan: ResolvedPlan) -> str:
        """How many GPUs the parameters with their states need, if these are more."""
        gpus = math.ceil(self._choice({}).all_state_bytes() / self.memory)
        if gpus <= plan.world_size:
            return ""
        what = "; parameters with their gradients and optimizer states alone need"
        return f"{what} {gpus:,} such GPUs or more"


def _with_capacity(found: OperatorPlan, gib: float) -> OperatorPlan:
    """Strategies found without a limit, with a word where a GPU has less memory than they take."""
    if found.bytes <= gib * GIB:
        return found
    said = f"A GPU has {gib:,.4g} GiB, so they do not fit; a memory limit finds what does."
    return replace(found, reason=f"{found.reason} {said}")


def _that_fits(weighed: Weighed, memory: float, beside: str) -> OperatorPlan:
    """The fastest answer whose peak is within `memory`. Raises `MemoryRefusal`, which says what is
    `beside`, where none is.
    """
    tried = [weighed(None)]
    for _ in range(ATTEMPTS):
        limit = _next_limit(tried, memory)
        if limit is None:
            break
        try:
            tried.append(weighed(limit))
        except MemoryRefusal as error:
            tried += [weighed(error.least * part) for part in ABOVE_LEAST]
            if not any(one.fits for one in tried):
                least = min(one.peak or 0.0 for one in tried)
                raise too_little_memory(memory, least, beside) from error
    return min((one for one in tried if one.fits), key=lambda one: one.seconds)


def _next_limit(tried: Sequence[OperatorPlan], memory: float) -> float | None:
    """The limit less what the last answer takes besides; None where it is hardly another, or
    that answer was known.
    """
    last = tried[-1]
    most = max((one.bytes for one in tried if one.fits), default=0.0)
    too_much = min((one.bytes for one in tried if not one.fits and one.bytes > most), default=0.0)
    if not too_much or (most and last.bytes in [one.bytes for one in tried[:-1]]):
        return None
    limit = min(last.bytes + memory - (last.peak or 0.0), too_much * (1 - ROUNDING))
    limit = max(limit, 1.0)  # byte, where the rest alone is more than the limit
    return limit if not most or limit - most > CLOSE * memory else None
