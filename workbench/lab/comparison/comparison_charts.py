"""The charts of a comparison."""

from __future__ import annotations

import re
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
from workbench.lab.charts.chart_data import own_words
from workbench.lab.charts.memory_map import has_memory_map
from workbench.lab.comparison.comparison_tables import plain_value
from workbench.lab.comparison.entries import ComparisonEntry, plan_differences
from workbench.lab.live.figure import Figure
from workbench.lab.panel.control_values import MISSING, read_path
from workbench.plan.schema import written_fields
from workbench.untrusted_text import visible

SHORT_LETTERS = 28
"""Letters of a name that is short: a bar's, beside its source."""


def comparison_figures(entries: Sequence[ComparisonEntry]) -> list[Figure]:
    """All losses in one chart, step times in one, then the charts of each entry; empty ones are
    left out.
    """
    names = dict(zip([entry.name for entry in entries], map(visible, short_names(entries))))
    everything = [
        replace(profile, run=names[entry.name]) for entry in entries for profile in entry.profiles
    ]
    trained = [profile for profile in everything if profile.loss]
    timed = [profile for profile in everything if profile.step_seconds or profile.notes.get("time")]
    shared = [loss(*trained), step_time_parts(*timed)]
    own = [figure for entry in entries for figure in entry_figures(entry, names[entry.name])]
    return [figure for figure in [*shared, *own] if figure.rows]


def short_names(entries: Sequence[ComparisonEntry]) -> list[str]:
    """Name of each entry in charts: the words that are not of all names; where those say nothing or
    are long, the fields in which the plans differ.
    """
    names = [entry.name for entry in entries]
    words = own_words(names)
    telling = all(re.search("[A-Za-z]", w) and not re.search(r"\(\d+\)$", w) for w in words)
    if len(names) == 1 or (telling and max(map(len, words), default=0) <= SHORT_LETTERS):
        return words
    return differing_fields(entries) or (words if telling else names)


def differing_fields(entries: Sequence[ComparisonEntry]) -> list[str]:
    """As few fields and values of each plan as tell all apart, written ones first; empty where none
    do, or many are needed.
    """
    written = [written_fields(entry.plan) for entry in entries if entry.plan]
    differences = plan_differences(entries)
    said = ["" for _ in entries]
    for path in sorted(differences, key=lambda p: all(read_path(w, p) is MISSING for w in written)):
        field = path.removesuffix(".name").removesuffix(".size").split(".")[-1]
        shown = [plain_value(differences[path].get(entry.name)) for entry in entries]
        words = [value if field == "preset" else f"{field} {value}" for value in shown]
        more = [", ".join(filter(None, pair)) for pair in zip(said, words)]
        said = more if len(set(more)) > len(set(said)) else said
    distinct = len(set(said)) == len(entries) and max(map(len, said)) <= SHORT_LETTERS
    return said if distinct else []


def entry_figures(entry: ComparisonEntry, name: str) -> list[Figure]:
    """The charts of one entry, its `name` in their titles."""
    measured, first = entry.profile_of("measured"), entry.profiles[0]
    figures = [
        memory(*entry.profiles),
        *([throughput(measured)] if measured else []),
        collectives(*entry.profiles),
        timeline(*[profile for profile in entry.profiles if len(profile.timeline)]),
        *([memory_map(first)] if has_memory_map(first.world_size) else []),
    ]
    return [
        replace(figure, name=f"{figure.name}_{entry.name}", title=f"{name}: {figure.title}")
        for figure in figures
    ]
