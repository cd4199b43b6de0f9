"""Peak memory of several plans by category, one bar a source, with a guess beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.lab import palette
from workbench.lab.charts import chart_data, memory_by_rank
from workbench.lab.live.figure import Figure
from workbench.profile import Profile
from workbench.units import byte_unit


def memory_by_plan(
    plans: Mapping[str, Sequence[Profile]], guess: Mapping[str, float] | None = None
) -> Figure:
    """Peak memory, max over ranks, stacked by category; one bar a source.

    Args:
        plans: Name of a plan -> its profiles, such as its estimate, its rehearsal and its run.
        guess: Name of a plan -> bytes that the reader expects; drawn as a grey bar.
    """
    guessed = guess or {}
    bars = [
        bar
        for name, profiles in plans.items()
        for bar in (
            *([guess_bar(name, guessed[name])] if name in guessed else []),
            *(largest_bar(name, profile) for profile in profiles),
        )
    ]
    every = [profile for profiles in plans.values() for profile in profiles]
    capacity = next((p.capacity_bytes for p in every if p.capacity_bytes), None)
    unit, size = byte_unit(bar["total"] for bar in bars)
    largest = max((bar["total"] for bar in bars), default=0)
    shown = capacity and largest >= memory_by_rank.CAPACITY_SHOWN_FROM * capacity
    limit = capacity if shown else None
    sources = tuple(dict.fromkeys(bar["bar"] for bar in bars))
    rows = [
        row
        for bar in bars
        for row in memory_by_rank.bar_rows(bar, size, bar["bar"] if len(sources) > 1 else "")
    ]
    if rows:
        rows[0] |= memory_by_rank.capacity_cells(unit, size, 1.35 * largest, limit)
    categories = tuple(
        n for n in palette.MEMORY_COLOURS if any(row["category"] == n for row in rows)
    )
    return Figure(
        name="memory_by_plan",
        title=f"Peak memory, max over ranks ({unit})",
        subtitle=chart_data.source_words(every),
        spec=memory_by_rank.memory_spec(
            unit,
            categories,
            chart_data.seen_parts(list(map(palette.category_label, categories)), rows, "called"),
            tuple(plans),
            sources,
            memory_by_rank.capacity_label_side(limit, largest),
        ),
        rows=rows,
    )


def largest_bar(name: str, profile: Profile) -> dict[str, Any]:
    """The bar of a profile's rank with the most."""
    ranks = memory_by_rank.peak_parts_by_rank(profile).values()
    largest = max(map(memory_by_rank.largest_sample, ranks), key=lambda found: found["total"])
    return {"label": name, "bar": profile.source, "source": profile.source} | largest


def guess_bar(name: str, size: float) -> dict[str, Any]:
    """The bar of a guess of `size` bytes."""
    cells = {"label": name, "bar": palette.GUESS, "source": palette.GUESS, "step": None}
    return cells | {"total": size, "categories": {palette.GUESS: size}}
