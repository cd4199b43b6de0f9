"""A plan's problem sizes, with its operator strategies and the redistributions between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.costmodel.inputs.operator_strategies import OperatorStrategies
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.costmodel.memory.bucket_elements import with_packed_buckets
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.python_model_rules import untraced
from workbench.plan.rules.strategy.operator_rules import boundary_axes, placements, sides
from workbench.plan.rules.strategy.recompute_rules import recomputed_modules
from workbench.plan.rules.supported import require
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh


def planned_workload(
    plan: ResolvedPlan,
    ranks: Sequence[int] | None = None,
    traced: TracedStages | None = None,
    packed: bool = True,
) -> Workload:
    """Per-rank problem sizes of a complete plan, operators and all.

    Args:
        plan: The plan; with a stand-in shape where `traced` is given.
        ranks: Global ranks to evaluate, as `workload` takes them.
        traced: The user's module that the plan runs, where it is that.
        packed: Whether single tensors are packed into buckets, which takes most of the time.

    Raises:
        PlanError: The plan uses a field that the cost model does not cover; the message names it.
    """
    if traced is not None:
        found = with_packed_buckets(workload(plan, ranks, traced=traced))
        if len(traced.stages) == 1:
            return found
        return replace(found, hidden_per_rank=math.prod(traced.boundary) / found.tokens)
    if plan.code:
        raise untraced(plan)
    require(plan, "estimate")
    found = workload(plan, ranks, operator_strategies(plan))
    return with_packed_buckets(found) if packed else found


def operator_strategies(plan: ResolvedPlan) -> OperatorStrategies | None:
    """Operator strategies of a complete plan, with the redistributions that its ranks choose; None
    where its operators are not named, or one rank has them all.
    """
    if plan.code or plan.profiled or not sides(plan):
        return None
    return OperatorStrategies(
        sides(plan),
        placements(plan),
        operator_mesh(plan).redistribution,
        frozenset(recomputed_modules(plan.strategy.recompute, plan.shape)),
        boundary_axes(plan),
        plan.strategy.expert.size,
    )
