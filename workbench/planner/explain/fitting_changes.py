"""For a plan that does not fit: the smallest changes that make it fit, each with the step time it
costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.planner.explain.plan_figures import Change, Effect, Subject, figures
from workbench.planner.memory_advice import (
    more_gpus,
    one_field_here,
    other_gpus,
    peak_bytes,
    together_here,
)

SHOWN = 6


def fixes(subject: Subject) -> list[Effect]:
    """At most six changes that fit, the smallest of each kind; empty where the plan fits.

    One field where one is enough on the same GPUs, else several; then more GPUs, then another. On
    the same GPUs those that keep a plan runnable that is so come first, then the fastest.
    """
    if subject.figures.fits:
        return []
    own = one_field_here(subject.full)
    here = _smallest(subject, iter(own)) or _smallest(subject, _pairs(own))
    here = here or _smallest(subject, together_here(subject.full), most=1)
    hardware = [*more_gpus(subject.full), *other_gpus(subject.full)]
    other = _smallest(subject, (change for change in hardware if len(change) == 1))
    if not here and not other:
        other = _smallest(subject, iter(hardware), most=1)
    effects = [effect for change in other if (effect := _effect(subject, change))]
    return [*_ranked(subject, here)[: SHOWN - min(2, len(effects))], *effects][:SHOWN]


def _smallest(subject: Subject, changes: Iterator[Change], most: int = SHOWN) -> list[Change]:
    """The first change that fits of each set of fields."""
    found: dict[tuple[str, ...], Change] = {}
    for change in changes:
        if len(found) < most and tuple(change) not in found and _fits(subject, change):
            found[tuple(change)] = change
    return list(found.values())


def _fits(subject: Subject, change: Change) -> bool:
    try:
        full = subject.plan.replace(**change).resolve()
        return peak_bytes(full) <= full.gpu.memory_gib * 2**30
    except PlanError:
        return False


def _pairs(own: list[Change]) -> Iterator[Change]:
    """Two fields at once, neither a whole strategy; smallest steps first."""
    single = [change for change in own if "strategy.preset" not in change]
    yield from (a | b for a, b in combinations(single, 2) if a.keys() != b.keys())


def _ranked(subject: Subject, changes: list[Change]) -> list[Effect]:
    effects = [effect for change in changes if (effect := _effect(subject, change))]
    return sorted(
        effects, key=lambda e: (not _runs(subject, e), -e.after.tokens_per_second / e.after.gpus)
    )


def _effect(subject: Subject, change: Change) -> Effect | None:
    """As `plan.replace` makes it: what follows from a change by a preset's rules follows."""
    name = ", ".join(
        f"{field.removeprefix('strategy.')} → {value}" for field, value in change.items()
    )
    try:
        return Effect(
            name, change, subject.figures, figures(subject.plan.replace(**change).resolve())
        )
    except PlanError:
        return None


def _runs(subject: Subject, effect: Effect) -> bool:
    if unsupported(subject.full, "run"):
        return True
    return not unsupported(subject.plan.replace(**effect.changes).resolve(), "run")
