"""What each dimension of a plan's parallelism saves of memory: the plan without it, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench.errors import ChildError, PlanError
from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate
from workbench.planner.explain.asked_table import AskedTable
from workbench.planner.explain.plan_dimensions import Dimension, dimensions
from workbench.planner.explain.plan_figures import ExplainedPlan
from workbench.planner.plan_changes import Change
from workbench.profile import Profile
from workbench.units import duration_text, gib_text, risk_text

Rehearse = Callable[[Plan, list[int]], Profile]
"""Rehearses some ranks of a plan; `ChildError` where that fails or takes too long."""
WITHOUT_HEADS = (
    "without",
    "GPUs",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "peak (estimated)",
    "allocated (estimated)",
    "allocated (rehearsed)",
    "× the plan's",
    "OOM risk",
    "fits",
    "step time",
)
GROUPS = {"optimizer": ("optimizer", "master"), "activations": ("activations", "logits")}
"""Columns of several categories."""


@dataclass(frozen=True)
class WithoutOne:
    """The plan without one dimension, estimated and, where asked for, rehearsed.

    Attributes:
        name: The dimension; empty for the plan itself.
        changes: What `plan.replace` takes.
        gpus: Of the changed plan.
        estimated: Its estimate; None where it is illegal.
        rank: The rank whose estimated peak is the largest.
        ratio: Its estimated peak over that of the plan itself.
        rehearsed_bytes: What this rank allocates, rehearsed.
        note: Another global batch, or why a figure is absent.
    """

    name: str
    changes: Change
    gpus: int = 0
    estimated: Profile | None = None
    rank: int = 0
    ratio: float = 1.0
    rehearsed_bytes: int | None = None
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """The largest estimated peak of a rank."""
        return self.estimated.peak_bytes_by_rank[self.rank] if self.estimated else 0

    @property
    def allocated_bytes(self) -> int:
        """Of it in tensors, on the same rank; a rehearsal counts no more than these."""
        return self.estimated.peak_allocated_by_rank[self.rank] if self.estimated else 0

    def bytes_of(self, column: str) -> int:
        """Estimated bytes of a column's categories, each at its own maximum."""
        found = self.estimated.by_category if self.estimated else {}
        return sum(found.get(name, 0) for name in GROUPS.get(column, (column,)))

    def cells(self) -> tuple[str, ...]:
        """One row under `WITHOUT_HEADS`."""
        name = self.name or "(the plan)"
        if self.estimated is None:
            return (name, *["–"] * (len(WITHOUT_HEADS) - 1))
        risk = self.estimated.out_of_memory_risk
        return (
            name,
            f"{self.gpus:,}",
            *(gib_text(self.bytes_of(column)) for column in WITHOUT_HEADS[2:6]),
            gib_text(self.peak_bytes),
            gib_text(self.allocated_bytes),
            "–" if self.rehearsed_bytes is None else gib_text(self.rehearsed_bytes),
            f"{self.ratio:.2f}",
            "–" if risk is None else risk_text(risk),
            "yes" if self.estimated.fits else "NO",
            duration_text(self.estimated.step_seconds or 0),
        )

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data, null where there is none."""
        e = self.estimated
        return {
            "without": self.name or None,
            "changes": self.changes,
            "gpus": self.gpus or None,
            "peak_bytes": self.peak_bytes if e else None,
            "by_category": e.by_category if e else None,
            "times_the_plan": self.ratio if e else None,
            "fits": e.fits if e else None,
            "probability_of_running_out": e.out_of_memory_risk if e else None,
            "step_seconds": e.step_seconds if e else None,
            "allocated_bytes": self.allocated_bytes if e else None,
            "rehearsed_allocated_bytes": self.rehearsed_bytes,
            "note": self.note or None,
        }


def without_each(subject: ExplainedPlan, rehearse: Rehearse | None = None) -> AskedTable:
    """The plan, then the plan without each dimension that it has.

    Args:
        subject: The plan.
        rehearse: Rehearses the rank whose estimated peak is the largest; None: estimates alone.
    """
    every = [Dimension("", {}), *dimensions(subject.resolved)]
    found = [_without(subject, one, rehearse) for one in every]
    return AskedTable(
        "without_each",
        "Without each dimension: memory of the rank with the most (estimated)",
        WITHOUT_HEADS,
        [one.cells() for one in found],
        [f"without {one.name}: {one.note}" for one in found if one.note],
        [one.to_json() for one in found],
        ("step time", "parameters", "gradients", "optimizer", "activations"),
    )


def _without(subject: ExplainedPlan, one: Dimension, rehearse: Rehearse | None) -> WithoutOne:
    refused = ""
    for changes in _changes(subject, one):
        try:
            found = estimate(plan := subject.plan.replace(**changes))
        except PlanError as error:
            refused = refused or str(error)
        else:
            return _figures(subject, one.name, changes, plan, found, rehearse)
    return WithoutOne(one.name, one.change, note=refused)


def _changes(subject: ExplainedPlan, one: Dimension) -> Iterator[Change]:
    """The change at the plan's own batch, then at as many microbatches a replica."""
    if not one.change:
        yield {}
        return
    batch = subject.resolved.training.global_batch
    same = {**subject.pinned_fields, "training.global_batch": batch, **one.change}
    yield same
    if one.ranks > 1:
        yield {**same, "training.global_batch": batch * one.ranks}


def _figures(
    subject: ExplainedPlan,
    name: str,
    changes: Change,
    plan: Plan,
    found: Profile,
    rehearse: Rehearse | None,
) -> WithoutOne:
    peaks = found.peak_bytes_by_rank
    worst = max(peaks, key=lambda rank: (peaks[rank], -rank))
    ratio = peaks[worst] / max(subject.profile.peak_bytes_by_rank.values())
    own = subject.resolved.training.global_batch
    batch = changes.get("training.global_batch", own)
    notes = [f"global batch {batch:,}"] if batch != own else []
    rehearsed = None
    if rehearse is not None:
        try:
            rehearsed = rehearse(plan, [worst]).peak_allocated_by_rank[worst]
        except (PlanError, ChildError) as error:
            notes.append(str(error))
    note = "; ".join(notes)
    return WithoutOne(name, changes, found.world_size, found, worst, ratio, rehearsed, note)
