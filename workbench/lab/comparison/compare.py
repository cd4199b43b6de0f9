"""Comparison: estimated, rehearsed and measured side by side, rank by rank, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.lab import palette
from workbench.lab.comparison import comparison_tables
from workbench.lab.comparison.entries import ComparisonEntry, entries_of, plan_differences
from workbench.plan.schema import Plan
from workbench.profile import ALLOCATED, Profile, batches_differ

if TYPE_CHECKING:
    from workbench.lab.live.figure import Figure
    from workbench.runs.run import Run

SOURCES = tuple(palette.SOURCE_COLOURS)


@dataclass
class Comparison:
    """Profiles of several plans or runs, side by side; shows itself as tables."""

    entries: list[ComparisonEntry]
    frame: pd.DataFrame = field(init=False)
    """One row a plan and rank: peak bytes by source, run and step of the measured peak, and the
    relative error of estimate and rehearsal to it.
    """
    summary: pd.DataFrame = field(init=False)
    """One row a plan and source: peak memory (max rank) in bytes, step time in seconds, tokens/s,
    state of the run, losses, steps that loss scaling skipped where it is on.
    """

    differences: dict[str, dict[str, Any]] = field(init=False)
    """Dotted field -> its value by plan or run, of the fields in which they are not all equal."""

    left_out: list[str] = field(init=False, default_factory=list)
    """Charts that the last report could not hold, each with the reason."""

    def __post_init__(self) -> None:
        self.frame = pd.DataFrame([row for entry in self.entries for row in peak_rows(entry)])
        self.summary = pd.DataFrame([row for entry in self.entries for row in summary_rows(entry)])
        self.differences = plan_differences(self.entries)

    @property
    def tables(self) -> list[comparison_tables.Table]:
        """The tables for people, in their order."""
        profiles = [profile for entry in self.entries for profile in entry.profiles]
        found = [comparison_tables.summary_table(self.summary, batches_differ(profiles))]
        if self.differences:
            found.append(comparison_tables.differences_table(self.differences))
        return [*found, comparison_tables.memory_table(self.frame)]

    def figures(self) -> list[Figure]:
        """Charts: the losses together, then memory, step time, timeline and communication of each
        plan.
        """
        from workbench.lab.comparison.comparison_charts import comparison_figures

        return comparison_figures(self.entries)

    def to_html(self, path: str | Path) -> Path:
        """Write the whole comparison as one page that needs no network; its path."""
        from workbench.lab.comparison.report import write_report

        self.left_out = write_report(path, self.entries, self.tables, self.figures())
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        """The tables as plain data."""
        return {
            "memory": comparison_tables.plain_rows(self.frame),
            "summary": comparison_tables.plain_rows(self.summary),
            "differences": self.differences,
        }

    def _repr_html_(self) -> str:
        return "".join(comparison_tables.html_table(*table) for table in self.tables)

    def __repr__(self) -> str:
        return "\n\n".join(comparison_tables.text_table(*table) for table in self.tables)


def compare(*items: Plan | Profile | Run | Sequence[Profile]) -> Comparison:
    """Put plans, runs and profiles side by side.

    Args:
        items: Plans are estimated; runs are estimated and measured. Profiles belong to one plan if
            they stand in one sequence, or in a row until a source comes again.

    Returns:
        A comparison that shows itself as tables, and writes itself with `to_html` and `to_json`.

    Raises:
        ValueError: Nothing is given.
        PlanError: A plan is illegal.
    """
    if not items:
        raise ValueError("compare needs at least one plan, run or profile")
    return Comparison(entries_of(items))


def peak_rows(entry: ComparisonEntry) -> list[dict[str, Any]]:
    """One row a rank of `Comparison.frame`."""
    peaks = {
        source: profile.peak_bytes_by_rank
        for source in SOURCES
        if (profile := entry.profile_of(source))
    }
    allocated = {
        source: profile.peak_allocated_by_rank
        for source in SOURCES
        if (profile := entry.profile_of(source))
    }
    measured = entry.profile_of("measured")
    steps = peak_steps(measured) if measured else {}
    rows = []
    for rank in sorted({rank for by_rank in peaks.values() for rank in by_rank}):
        row: dict[str, Any] = {"plan": entry.name, "rank": rank}
        row |= {f"{source}_bytes": peaks.get(source, {}).get(rank) for source in SOURCES}
        row |= {"run": measured.run if measured else None, "step": steps.get(rank)}
        row |= {
            f"{source}_allocated_bytes": allocated.get(source, {}).get(rank) for source in SOURCES
        }
        # A rehearsal knows no context and no fragmentation, and NVML may not tell a process' share:
        # allocated is what all three count.
        counted = row["measured_allocated_bytes"]
        row |= {
            f"{source}_error": relative_error(row[f"{source}_allocated_bytes"], counted)
            for source in SOURCES[:2]
        }
        rows.append(row)
    return rows


def peak_steps(measured: Profile) -> dict[int, int]:
    """Rank -> the sampled step of its peak, by the allocator's count."""
    frame = measured.memory
    frame = frame[
        (frame.category == ALLOCATED) & (frame.moment == "peak") & (frame.tier == "device")
    ]
    totals = frame.groupby(["rank", "step"], as_index=False).bytes.sum()
    peaks = totals.loc[totals.groupby("rank").bytes.idxmax()] if len(totals) else totals
    return {int(rank): int(step) for rank, step in zip(peaks["rank"], peaks.step)}


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """(predicted - measured) / measured; None where either is not known."""
    return (predicted - measured) / measured if predicted is not None and measured else None


def _state(entry: ComparisonEntry, profile: Profile) -> str | None:
    """State of a run; of a plan, that its GPUs cannot hold it."""
    if profile.source == "measured":
        return entry.state
    return comparison_tables.UNFIT if profile.unfit_words else None


def summary_rows(entry: ComparisonEntry) -> list[dict[str, Any]]:
    """One row a source of `Comparison.summary`."""
    rows = []
    for profile in (found for source in SOURCES if (found := entry.profile_of(source))):
        peaks, losses = profile.peak_bytes_by_rank, profile.loss
        rows.append(
            {
                "plan": entry.name,
                "source": profile.source,
                "run": profile.run,
                "ranks": profile.world_size,
                "peak_bytes": max(peaks.values()) if peaks else None,
                "step_seconds": profile.step_seconds,
                "step_seconds_90": profile.step_interval,
                "tokens_per_second": profile.tokens_per_second,
                "steps": len(losses) or None,
                "state": _state(entry, profile),
                "first_loss": losses[0] if losses else None,
                "last_loss": losses[-1] if losses else None,
            }
            | ({} if profile.skipped_steps is None else {"skipped_steps": profile.skipped_steps})
        )
    return rows
