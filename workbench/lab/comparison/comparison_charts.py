"""The charts of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.lab.charts import collectives, loss, memory, memory_map, parts, throughput, timeline
from workbench.lab.charts.memory_map import drawable
from workbench.lab.live.figure import Figure
from workbench.untrusted_text import visible

if TYPE_CHECKING:
    from workbench.lab.comparison.compare import Entry


def gallery(entries: Sequence[Entry]) -> list[Figure]:
    """All losses in one chart, step times in one, then the charts of each entry; empty ones are
    left out.
    """
    everything = [
        replace(profile, run=visible(entry.name)) for entry in entries for profile in entry.profiles
    ]
    trained = [profile for profile in everything if profile.loss]
    timed = [profile for profile in everything if profile.step_seconds or profile.notes.get("time")]
    shared = [loss(*trained), parts(*timed)]
    return [
        figure for figure in [*shared, *(f for entry in entries for f in of(entry))] if figure.rows
    ]


def of(entry: Entry) -> list[Figure]:
    """The charts of one entry, its name in their titles."""
    measured, first = entry.of("measured"), entry.profiles[0]
    found = [
        memory(*entry.profiles),
        collectives(*entry.profiles),
        timeline(*[p for p in entry.profiles if len(p.timeline)]),
    ]
    if measured:
        found.insert(1, throughput(measured))
    if drawable(first.world_size):
        found.append(memory_map(first))
    return [
        replace(
            figure,
            name=f"{figure.name}_{entry.name}",
            title=f"{visible(entry.name)}: {figure.title}",
        )
        for figure in found
    ]
