"""Comparison: estimated, rehearsed and measured side by side, rank by rank, in one table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.errors import PlanError
from workbench.lab import palette
from workbench.lab.comparison import comparison_tables
from workbench.plan.plan_diff import differing
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.profile import ALLOCATED, Profile

if TYPE_CHECKING:
    from workbench.lab.live.figure import Figure
    from workbench.runs.run import Run

SOURCES = tuple(palette.SOURCES)


@dataclass
class Entry:
    """One thing that is compared: its name, what instruments said of it, and its plan where it has
    one.
    """

    name: str
    profiles: list[Profile]
    plan: Plan | None = None
    state: str | None = None
    """How far its run came, in words; None for what is no run."""

    def of(self, source: str) -> Profile | None:
        """What one instrument said; the last word where it spoke twice."""
        return next(
            (profile for profile in reversed(self.profiles) if profile.source == source), None
        )


@dataclass
class Comparison:
    """Profiles of several plans or runs, side by side; shows itself as tables, `frame` is for
    machines.
    """

    entries: list[Entry]
    frame: pd.DataFrame = field(init=False)
    """One row a plan and rank: peak bytes by source, the measured one's run and step, relative
    differences to it.
    """
    summary: pd.DataFrame = field(init=False)
    """One row a plan and source: fullest rank in bytes, seconds a step, tokens a second, state of
    the run, losses.
    """

    differences: dict[str, dict[str, Any]] = field(init=False)
    """Dotted field of the plans -> its value by name of plan or run, of the fields in which they
    are not all equal.
    """

    left_out: list[str] = field(init=False, default_factory=list)
    """Charts that the last report could not hold, each with the reason."""

    def __post_init__(self) -> None:
        self.frame = pd.DataFrame([row for entry in self.entries for row in peak_rows(entry)])
        self.summary = pd.DataFrame([row for entry in self.entries for row in summary_rows(entry)])
        self.differences = differences(self.entries)

    @property
    def sheets(self) -> list[comparison_tables.Sheet]:
        """The tables for people, in their order."""
        told = [comparison_tables.differences_table(self.differences)] if self.differences else []
        return [
            comparison_tables.summary_table(self.summary),
            *told,
            comparison_tables.memory_table(self.frame),
        ]

    def figures(self) -> list[Figure]:
        """Charts: the losses together, then for each plan its memory, time, timeline and
        communication.
        """
        from workbench.lab.comparison.comparison_charts import gallery

        return gallery(self.entries)

    def to_html(self, path: str | Path) -> Path:
        """Write the whole comparison as one page that needs no network; its path."""
        from workbench.lab.comparison.report import write

        return write(self, path)

    def to_json(self) -> dict[str, Any]:
        """The tables as plain data."""
        return {
            "memory": comparison_tables.records(self.frame),
            "summary": comparison_tables.records(self.summary),
            "differences": self.differences,
        }

    def _repr_html_(self) -> str:
        return "".join(comparison_tables.page_table(*sheet) for sheet in self.sheets)

    def __repr__(self) -> str:
        return "\n\n".join(comparison_tables.text_table(*sheet) for sheet in self.sheets)


def compare(*items: Plan | Profile | Run | Sequence[Profile]) -> Comparison:
    """Put plans, runs and profiles side by side.

    A plan is estimated, a run estimated and measured. Profiles belong to one plan if they stand in
    one sequence, or in a row until a source comes again. Raises `ValueError` where nothing is
    given, `PlanError` for an illegal plan.
    """
    if not items:
        raise ValueError("compare needs at least one plan, run or profile")
    entries = [entry(item) for item in together(items)]
    names = [found.name for found in entries]
    for number, found in enumerate(entries, start=1):
        if names.count(found.name) > 1:
            found.name = f"{found.name} ({number})"
    return Comparison(entries)


def together(items: Sequence[Any]) -> list[Any]:
    """The items, with profiles in a row joined until a source comes again: estimate, rehearsal and
    run of one plan.
    """
    found: list[Any] = []
    for item in items:
        joined = found[-1] if found and isinstance(found[-1], list) else None
        if not isinstance(item, Profile):
            found.append(tuple(item) if isinstance(item, Sequence) else item)
        elif joined is not None and item.source not in [profile.source for profile in joined]:
            joined.append(item)
        else:
            found.append([item])
    return found


def entry(item: Any) -> Entry:
    """What is known of one thing to compare."""
    if isinstance(item, Plan):
        return Entry(item.resolve().name, [estimated(item)], item)
    if isinstance(item, Sequence):
        profiles = list(item)
        return Entry(profiles[0].run, profiles, state=state_now(profiles))
    state = item.state  # before its records: what it says has been done is then among them
    measured = item.profile()
    return Entry(
        item.plan.name, [estimated(item.plan), measured], item.plan, said(state.phase, measured)
    )


def state_now(profiles: Sequence[Profile]) -> str | None:
    """How far the run has come that one of the profiles was measured on; None where its directory
    is not here.
    """
    for measured, run in runs_of(profiles):
        with contextlib.suppress(ValueError, PlanError):
            return said(run.state.phase, measured)
    return None


def runs_of(profiles: Sequence[Profile]) -> Iterator[tuple[Profile, Run]]:
    """Each measured profile with its run, of those whose directory is here."""
    from workbench.runs.run import Run

    for measured in (
        profile
        for profile in profiles
        if profile.source == "measured" and "run_dir" in profile.notes
    ):
        with contextlib.suppress(ValueError, PlanError):
            yield measured, Run(measured.notes["run_dir"])


def plan_of(entry: Entry) -> ResolvedPlan | None:
    """The complete plan of an entry: its own, else that of the run on which it was measured; None
    where it has none.
    """
    if entry.plan:
        return entry.plan.resolve()
    for _, run in runs_of(entry.profiles):
        with contextlib.suppress(ValueError, PlanError):
            return run.plan
    return None


def differences(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Dotted field -> its value by name, of the fields in which the entries' plans are not all
    equal.
    """
    plans = {entry.name: plan for entry in entries if (plan := plan_of(entry))}
    return {
        name: dict(zip(plans, values)) for name, values in differing(list(plans.values())).items()
    }


def said(phase: str, measured: Profile) -> str:
    """A run's phase; where it ended early, the last step that it did, counted from 1; what of it is
    left out.
    """
    words = phase
    if phase in ("failed", "stopped"):
        last = measured.steps.step.max()
        words += " before step 1" if last != last else f" after step {int(last) + 1}"
    return "; ".join([words, *(f"{what} left out" for what in measured.notes.get("left_out", []))])


def estimated(plan: Plan) -> Profile:
    """The plan's estimate."""
    from workbench.planner import estimate

    return estimate(plan)


def peak_rows(entry: Entry) -> list[dict[str, Any]]:
    """One row a rank of the frame."""
    peaks = {
        source: profile.peak_bytes_by_rank for source in SOURCES if (profile := entry.of(source))
    }
    measured = entry.of("measured")
    steps = peak_steps(measured) if measured else {}
    rows = []
    for rank in sorted({rank for found in peaks.values() for rank in found}):
        row: dict[str, Any] = {"plan": entry.name, "rank": rank}
        row |= {f"{source}_bytes": peaks.get(source, {}).get(rank) for source in SOURCES}
        row |= {"run": measured.run if measured else None, "step": steps.get(rank)}
        row |= {
            f"{source}_error": error(row[f"{source}_bytes"], row["measured_bytes"])
            for source in SOURCES[:2]
        }
        rows.append(row)
    return rows


def peak_steps(measured: Profile) -> dict[int, int]:
    """Rank -> the sampled step on which it was fullest, by the allocator's count."""
    frame = measured.memory
    frame = frame[
        (frame.category == ALLOCATED) & (frame.moment == "peak") & (frame.tier == "device")
    ]
    totals = frame.groupby(["rank", "step"], as_index=False).bytes.sum()
    fullest = totals.loc[totals.groupby("rank").bytes.idxmax()] if len(totals) else totals
    return {int(rank): int(step) for rank, step in zip(fullest["rank"], fullest.step)}


def error(predicted: float | None, measured: float | None) -> float | None:
    """Relative difference of a prediction to what was measured; positive: predicted too much."""
    return (predicted - measured) / measured if predicted is not None and measured else None


def summary_rows(entry: Entry) -> list[dict[str, Any]]:
    """One row a source of the summary."""
    rows = []
    for profile in (found for source in SOURCES if (found := entry.of(source))):
        peaks, losses = profile.peak_bytes_by_rank, profile.loss
        rows.append(
            {
                "plan": entry.name,
                "source": profile.source,
                "run": profile.run,
                "ranks": profile.world_size,
                "peak_bytes": max(peaks.values()) if peaks else None,
                "step_seconds": profile.step_seconds,
                "tokens_per_second": profile.tokens_per_second,
                "steps": len(losses) or None,
                "state": entry.state if profile.source == "measured" else None,
                "first_loss": losses[0] if losses else None,
                "last_loss": losses[-1] if losses else None,
            }
        )
    return rows
