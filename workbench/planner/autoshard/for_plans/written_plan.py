"""The plan whose operators are searched, and the one that runs the strategies that were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.autoshard.choice_result import OperatorPlan

ONE_DIMENSION = {"strategy.tensor.algorithm": "1d", "strategy.tensor.sequence": False}
"""Fields that turn off what splits operators in other ways."""
REPLICATED = {"final_norm": "((1,1),(1,))"}, {"*": "((1,),)"}
"""Strategies that split nothing, of a model of ours and of code."""


def searched_plan(
    plan: Plan, ranks: int | Sequence[int] | None = None, sequences: int | None = None
) -> ResolvedPlan:
    """The complete plan whose operators are searched: `plan`, or where that is illegal as it is
    written, with the ranks of the operators as its tensor axis, as `plan_with` writes it.

    Args:
        plan: As written.
        ranks: As a number or a grid; default all that are not of the pipeline or context axis.
        sequences: Of one microbatch over them; default those that all their ranks had before, or
            one of them, where that is legal.

    Raises:
        PlanError: Both are illegal; says why the second is.
    """
    try:
        return plan.resolve()
    except PlanError:
        *batches, last = _plans_made(plan, ranks, sequences)
    for made in batches:
        with suppress(PlanError):
            return made.resolve()
    return last.resolve()


def _plans_made(
    plan: Plan, ranks: int | Sequence[int] | None, sequences: int | None
) -> Iterator[Plan]:
    """`plan` with the ranks of the operators as its tensor axis, and batches that it may have."""
    s = plan.strategy
    whole = max(1, plan.world_size // (s.pipeline.size * s.context.size))
    count = prod([ranks] if isinstance(ranks, int) else ranks or [whole])
    own, before, after = plan.task.micro_batch, whole // s.tensor.ranks or 1, whole // count or 1
    fields: dict[str, Any] = {
        "strategy.tensor.size": count,
        "strategy.operators": s.operators or REPLICATED[plan.code is not None],
    }
    for batch in [sequences] if sequences else dict.fromkeys((max(1, own * before // after), own)):
        yield plan.replace(**ONE_DIMENSION, **fields, **{"training.micro_batch": batch})


def plan_with(plan: Plan, found: OperatorPlan) -> Plan:
    """`plan` with the strategies and changes of `found`: legal, and as it was priced.

    The ranks of the operators are the tensor axis. What splits operators in other ways, sequence
    parallelism and tensor grids, is turned off. A microbatch of the operators has the sequences
    that all their ranks had before.

    Args:
        plan: As written.
        found: Its operator strategies.
    """
    full = searched_plan(plan, found.ranks, found.sequences)
    fields: dict[str, Any] = {
        "strategy.operators": found.forms,
        "strategy.tensor.size": prod(found.ranks),
        "training.micro_batch": found.sequences,
        "training.global_batch": full.training.global_batch,
    }
    return plan.replace(**(ONE_DIMENSION | fields | found.changes))
