"""The charts of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.lab.charts import (
    collectives,
    loss,
    memory,
    memory_map,
    step_time_parts,
    throughput,
    timeline,
)
from workbench.lab.charts.memory_map import has_memory_map
from workbench.lab.comparison.entries import ComparisonEntry
from workbench.lab.live.figure import Figure
from workbench.untrusted_text import visible


def comparison_figures(entries: Sequence[ComparisonEntry]) -> list[Figure]:
    """All losses in one chart, step times in one, then the charts of each entry; empty ones are
    left out.
    """
    everything = [
        replace(profile, run=visible(entry.name)) for entry in entries for profile in entry.profiles
    ]
    trained = [profile for profile in everything if profile.loss]
    timed = [profile for profile in everything if profile.step_seconds or profile.notes.get("time")]
    shared = [loss(*trained), step_time_parts(*timed)]
    own = [figure for entry in entries for figure in entry_figures(entry)]
    return [figure for figure in [*shared, *own] if figure.rows]


def entry_figures(entry: ComparisonEntry) -> list[Figure]:
    """The charts of one entry, its name in their titles."""
    measured, first = entry.profile_of("measured"), entry.profiles[0]
    figures = [
        memory(*entry.profiles),
        *([throughput(measured)] if measured else []),
        collectives(*entry.profiles),
        timeline(*[profile for profile in entry.profiles if len(profile.timeline)]),
        *([memory_map(first)] if has_memory_map(first.world_size) else []),
    ]
    return [
        replace(
            figure,
            name=f"{figure.name}_{entry.name}",
            title=f"{visible(entry.name)}: {figure.title}",
        )
        for figure in figures
    ]
