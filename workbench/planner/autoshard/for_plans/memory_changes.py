"""What a plan changes so that its operator strategies fit the memory of a rank: ZeRO over the data
axis that the operators leave, activation checkpointing, or both; the first of them that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.operator_cost import TensorBytes

GIB = 2**30
Search = Callable[[int, bool], OperatorPlan]
"""(ZeRO stage, whether layers are recomputed) -> the strategies within the limit."""


def first_that_fits(
    plan: ResolvedPlan, data: int, memory: float | None, search: Search
) -> OperatorPlan:
    """The strategies with the smallest change to the plan that lets them fit.

    Args:
        plan: The plan; what it shards and recomputes already is kept.
        data: Data-parallel ranks beside those of the operators.
        memory: Bytes of a rank; None: no limit.
        search: Finds strategies, or raises `PlanError`.

    Raises:
        PlanError: Nothing fits; with the least number that something would fit in.
    """
    stage, recompute = plan.strategy.data.zero, plan.strategy.recompute == "full"
    try:
        return search(stage, recompute)
    except PlanError as error:
        if memory is None or {problem.field for problem in error.problems} != {"memory"}:
            raise
        last = error
    kept = recompute or bool(plan.code)  # a model that is code recomputes nothing
    for zero, again in _changes(stage, kept, data):
        try:
            found = search(zero, again)
        except PlanError as error:
            last = error
            continue
        return _changed(found, _fields(zero - stage, zero, again and not kept))
    tried = [] if plan.code else ["recompute full"]
    tried += ["ZeRO-3"] if data > 1 else []
    said = f"; that is with {' and '.join(tried)}" if tried else ""
    raise refuse("memory", f"{last.problems[0].message}{said}")


def _changes(stage: int, recompute: bool, data: int) -> Iterator[tuple[int, bool]]:
    """The smallest first: more of ZeRO, then recompute alone and with it."""
    stages = range(stage + 1, 4) if data > 1 else range(0)
    yield from ((zero, recompute) for zero in stages)
    if not recompute:
        yield stage, True
        yield from ((zero, True) for zero in stages)


def _fields(more: int, zero: int, recompute: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"strategy.data.zero": zero} if more else {}
    return fields | ({"strategy.recompute": "full"} if recompute else {})


def _changed(found: OperatorPlan, changes: Mapping[str, Any]) -> OperatorPlan:
    said = ", ".join(f"{field}: {value}" for field, value in changes.items())
    least = f"No strategies alone fit {(found.limit or 0.0) / GIB:.4g} GiB; with {said} these do."
    return replace(found, changes=dict(changes), reason=f"{least} {found.reason}")


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
