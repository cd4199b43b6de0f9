"""Why a plan costs what it costs: what binds it, what makes it fit, what would change it."""

from __future__ import annotations

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.explain import fitting_changes as _fixes
from workbench.planner.explain import neighbor_plans as _moves
from workbench.planner.explain import sensitivity as _sensitivity
from workbench.planner.explain.bottlenecks import Binding, binding
from workbench.planner.explain.explanation import Explanation, Reasons
from workbench.planner.explain.plan_figures import Effect, Figures, Subject, subject
from workbench.planner.training_cost import cost

__all__ = [
    "Binding",
    "Effect",
    "Explanation",
    "Figures",
    "Reasons",
    "binding",
    "explain",
    "neighbours",
    "sensitivity",
    "why",
]


def why(plan: ResolvedPlan) -> Reasons:
    """What binds `plan`, in a sentence, and the smallest changes that make it fit. Raises
    `PlanError`.
    """
    return _why(subject(plan))


def sensitivity(plan: ResolvedPlan) -> list[Effect]:
    """Step and peak on twice the network, link, memory bandwidth and FLOP/s, on eight more cards,
    and so on.
    """
    return _sensitivity.sensitivity(subject(plan))


def neighbours(plan: ResolvedPlan) -> list[Effect]:
    """Every legal plan one step of one knob away: those that fit first, the fastest first."""
    return _moves.neighbours(subject(plan))


def explain(plan: Plan, tokens: float | None = None, price: float | None = None) -> Explanation:
    """Cost to `tokens` (default 20 a parameter) at `price` USD an hour and card (default the card's
    own), and reasons.

    Well under a second. Raises `PlanError` for an illegal plan or number.
    """
    asked = subject(plan)
    told = cost(asked.full, asked.profile, tokens, price)
    return Explanation(
        asked.full.name,
        asked.figures,
        told,
        _why(asked),
        tuple(_sensitivity.sensitivity(asked)),
        tuple(_moves.neighbours(asked)),
    )


def _why(asked: Subject) -> Reasons:
    return Reasons(binding(asked.full, asked.profile), tuple(_fixes.fixes(asked)))
