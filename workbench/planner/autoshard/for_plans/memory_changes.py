"""What a plan changes so that its operator strategies fit the memory of a rank: ZeRO over the data
axis that the operators leave, activation checkpointing, or both; the first of them that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.strategy_search.memory_limit import MemoryRefusal
from workbench.units import GIB

Search = Callable[[Mapping[str, Any]], OperatorPlan]
"""Fields that the plan changes -> the strategies within the limit."""
Bound = Callable[[Mapping[str, Any]], float]
"""Fields that the plan changes -> bytes that no strategies are below."""


def first_that_fits(
    plan: ResolvedPlan, data: int, memory: float, search: Search, bound: Bound
) -> OperatorPlan:
    """The strategies with the smallest change to the plan that lets them fit.

    Args:
        plan: The plan; what it shards and recomputes already is kept.
        data: Data-parallel ranks beside those of the operators.
        memory: Bytes of a rank.
        search: Finds strategies, or raises `PlanError`.
        bound: Changes that it puts above the limit are not searched, but for the least memory where
            it does so with all.

    Raises:
        PlanError: Nothing fits; with the least that was found.
    """
    kept = plan.strategy.recompute == "full" or bool(plan.code)  # code recomputes nothing
    tried = [{}, *_changes(plan.strategy.data.zero, kept, data)]
    errors: list[PlanError] = []
    for changes in [each for each in tried if bound(each) <= memory] or tried[-1:]:
        try:
            found = search(changes)
        except PlanError as error:
            errors.append(error)
            if not changes and not isinstance(error, MemoryRefusal):
                raise
            continue
        return _changed(found, memory) if changes else found
    refusals = [error for error in errors if isinstance(error, MemoryRefusal)]
    if not refusals:
        raise errors[-1]
    raise min(refusals, key=lambda error: error.least)


def _changes(stage: int, kept: bool, data: int) -> Iterator[dict[str, Any]]:
    """The smallest first: more of ZeRO, then recompute alone and with it."""
    stages = range(stage + 1, 4) if data > 1 else range(0)
    zero = [{"strategy.data.zero": more} for more in stages]
    yield from zero
    if not kept:
        again = {"strategy.recompute": "full"}
        yield again
        yield from (fields | again for fields in zero)


def _changed(found: OperatorPlan, memory: float) -> OperatorPlan:
    said = ", ".join(f"{field}: {value}" for field, value in found.changes.items())
    least = f"No strategies alone were found within {memory / GIB:.4g} GiB; with {said} these are."
    return replace(found, reason=f"{least} {found.reason}")


def sharded_state(sizes: TensorBytes, zero: int, data: int, by_microbatch: bool) -> TensorBytes:
    """Bytes of a parameter's states under ZeRO (1910.02054) over `data` ranks.

    Args:
        sizes: Unsharded.
        zero: The stage.
        data: Data-parallel ranks.
        by_microbatch: Whether gradients are reduced every microbatch; else ZeRO-2 and 3 keep them.
    """
    parameter, gradient = sizes.element, sizes.gradient
    optimizer = sizes.state - parameter - gradient
    state = parameter / (data if zero >= 3 else 1)
    state += gradient / (data if zero >= 2 and by_microbatch else 1)
    return replace(sizes, state=state + optimizer / (data if zero >= 1 else 1))
