"""Why a plan costs what it costs: what binds it, what makes it fit, what would change it."""

from __future__ import annotations

from workbench.plan.schema import Plan
from workbench.planner.explain import fitting_changes as _fixes
from workbench.planner.explain import neighbor_plans as _moves
from workbench.planner.explain import sensitivity as _sensitivity
from workbench.planner.explain.bottlenecks import Bottleneck, find_bottleneck
from workbench.planner.explain.explanation import Explanation, Reasons
from workbench.planner.explain.method_savings import method_savings
from workbench.planner.explain.placements import placement_table
from workbench.planner.explain.plan_figures import (
    ChangeEffect,
    ExplainedPlan,
    PlanFigures,
    explained_plan,
)
from workbench.planner.explain.without_each import Rehearse, without_each
from workbench.planner.framework_limits import broken_limits
from workbench.planner.plan_conditions import USUAL_RISK
from workbench.planner.training_cost import training_cost

__all__ = [
    "Bottleneck",
    "ChangeEffect",
    "Explanation",
    "PlanFigures",
    "Reasons",
    "explain",
    "find_bottleneck",
    "neighbours",
    "sensitivity",
    "why",
]


def why(plan: Plan) -> Reasons:
    """What binds `plan`, in a sentence, and the smallest changes that make it fit. Raises
    `PlanError`.
    """
    return _why(explained_plan(plan))


def sensitivity(plan: Plan) -> list[ChangeEffect]:
    """Step and peak on twice the network, link, memory bandwidth and FLOP/s, on eight more GPUs,
    and so on.
    """
    return _sensitivity.sensitivity(explained_plan(plan))


def neighbours(plan: Plan) -> list[ChangeEffect]:
    """Every legal plan one step of one knob away: those that fit first, the fastest first."""
    return _moves.neighbor_plans(explained_plan(plan))


def explain(
    plan: Plan,
    tokens: float | None = None,
    price: float | None = None,
    *,
    risk: float = USUAL_RISK,
    without: bool = False,
    placements: bool = False,
    rehearse: Rehearse | None = None,
) -> Explanation:
    """Cost to `tokens` (default 20 a parameter) at `price` USD an hour and GPU (default the GPU's
    own), and reasons.

    Well under a second. What fits, runs out of memory with a probability of at most `risk`, as in
    a search. `without` adds the plan without each of its dimensions, which `rehearse`
    rehearses too; `placements` the orders of its axes. Raises `PlanError` for an illegal plan or
    number.
    """
    asked = explained_plan(plan, risk=risk)
    cost = training_cost(asked.resolved, asked.profile, tokens, price)
    return Explanation(
        asked.resolved.name,
        asked.figures,
        tuple(asked.profile.notes["step_seconds_90"]),
        cost,
        _why(asked),
        tuple(_sensitivity.sensitivity(asked)),
        tuple(_moves.neighbor_plans(asked)),
        (
            *([without_each(asked, rehearse)] if without else []),
            *([placement_table(asked)] if placements else []),
        ),
        method_savings(asked),
    )


def _why(asked: ExplainedPlan) -> Reasons:
    return Reasons(
        find_bottleneck(asked.resolved, asked.profile),
        tuple(_fixes.changes_that_fit(asked)),
        tuple(broken_limits(asked.resolved)),
    )
