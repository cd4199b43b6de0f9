"""For a plan that does not fit: the smallest changes that make it fit, each with the step time it
costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.planner.explain.plan_figures import ChangeEffect, ExplainedPlan, plan_figures
from workbench.planner.framework_limits import stays_possible
from workbench.planner.memory_advice import planned_memory
from workbench.planner.plan_changes import (
    Change,
    combined_changes,
    larger_gpus,
    more_gpus,
    one_field_changes,
)

MAX_SHOWN = 6


def changes_that_fit(subject: ExplainedPlan) -> list[ChangeEffect]:
    """At most six changes that fit, the smallest of each kind; empty where the plan fits.

    One field where one is enough on the same GPUs, else several; then more GPUs, then another. On
    the same GPUs those that keep a plan runnable that is so come first, then those that keep its
    strategy, then the fastest.
    """
    if subject.figures.fits:
        return []
    own = one_field_changes(subject.resolved)
    here = _first_fitting(subject, iter(own)) or _first_fitting(subject, _pairs(own))
    here = here or _first_fitting(subject, combined_changes(subject.resolved), most=1)
    hardware = [*more_gpus(subject.resolved), *larger_gpus(subject.resolved)]
    other = _first_fitting(subject, (change for change in hardware if len(change) == 1))
    if not here and not other:
        other = _first_fitting(subject, iter(hardware), most=1)
    effects = [effect for change in other if (effect := _effect(subject, change))]
    return [*_ranked(subject, here)[: MAX_SHOWN - min(2, len(effects))], *effects][:MAX_SHOWN]


def _first_fitting(
    subject: ExplainedPlan, changes: Iterator[Change], most: int = MAX_SHOWN
) -> list[Change]:
    """The first change that fits of each set of fields."""
    found: dict[tuple[str, ...], Change] = {}
    for change in changes:
        if len(found) < most and tuple(change) not in found and _fits(subject, change):
            found[tuple(change)] = change
    return list(found.values())


def _fits(subject: ExplainedPlan, change: Change) -> bool:
    try:
        full = subject.plan.replace(**change).resolve()
        memory = planned_memory(full)
        within = memory.fits and memory.runs_out <= subject.figures.risk
        return within and stays_possible(subject.resolved, full)
    except PlanError:
        return False


def _pairs(own: list[Change]) -> Iterator[Change]:
    """Two fields at once, neither a whole strategy; smallest steps first."""
    single = [change for change in own if "strategy.preset" not in change]
    yield from (a | b for a, b in combinations(single, 2) if a.keys().isdisjoint(b))


def _ranked(subject: ExplainedPlan, changes: list[Change]) -> list[ChangeEffect]:
    def rank(e: ChangeEffect) -> tuple[bool, bool, float]:
        other = "strategy.preset" in e.changes
        return not _runs(subject, e), other, -e.after.tokens_per_second / e.after.gpus

    return sorted((e for change in changes if (e := _effect(subject, change))), key=rank)


def _effect(subject: ExplainedPlan, change: Change) -> ChangeEffect | None:
    """As `plan.replace` makes it: what follows from a change by a preset's rules follows."""
    name = ", ".join(
        f"{field.removeprefix('strategy.')} → {value}" for field, value in change.items()
    )
    try:
        after = plan_figures(subject.plan.replace(**change).resolve(), subject.figures.risk)
        return ChangeEffect(name, change, subject.figures, after)
    except PlanError:
        return None


def _runs(subject: ExplainedPlan, effect: ChangeEffect) -> bool:
    if unsupported(subject.resolved, "run"):
        return True
    return not unsupported(subject.plan.replace(**effect.changes).resolve(), "run")
