"""Peak memory of each rank, stacked by category, with the GPU's capacity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import altair as alt

from workbench.lab import palette, rank_selection
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import ALLOCATED, Profile
from workbench.units import byte_unit, bytes_text, digits
from workbench.vocabulary import FRAGMENTATION, MEANINGS, NOT_ALLOCATED, OUTSIDE, REST, UNATTRIBUTED

CAPACITY_SHOWN_FROM = 0.15
"""The GPU's capacity is drawn where a rank's peak reaches this share of it; elsewhere the subtitle
states it.
"""
BAR_HEIGHT = 15
EXPLAINED_CATEGORIES = {
    **{name: MEANINGS[name] for name in ("overhead", FRAGMENTATION, OUTSIDE)},
    UNATTRIBUTED: REST,
}
"""Categories whose names say too little -> what is in them."""
MIN_EXPLAINED_SHARE = 0.02
"""Share of a bar from which the subtitle explains a category."""


def memory(*profiles: Profile) -> Figure:
    """Peak memory by rank, stacked by category; one bar a source.

    A bar shows the instant of the largest sum. What the allocator itself counts in a measured run
    and no category explains is drawn as unattributed. On a GPU, estimates and runs also have what
    the allocator reserved beyond that, and what is in use outside of it.

    Args:
        profiles: Of one plan, such as its estimate, its rehearsal and its run.
    """
    labels = rank_selection.shown_ranks(profiles)
    named = zip(profiles, chart_data.bar_names(profiles))
    bars = [bar for profile, name in named for bar in rank_bars(profile, name, labels)]
    unit, size = byte_unit(bar["total"] for bar in bars)
    several = len(profiles) > 1
    rows = [row for bar in bars for row in bar_rows(bar, size, bar["bar"] if several else "")]
    capacity = next((p.capacity_bytes for p in profiles if p.capacity_bytes), None)
    largest = max((bar["total"] for bar in bars), default=0)
    near = capacity if capacity and largest >= CAPACITY_SHOWN_FROM * capacity else None
    if rows:
        rows[0] |= capacity_cells(unit, size, largest * (1.45 if several else 1.2), near)
    categories = tuple(
        name for name in palette.MEMORY_COLOURS if any(row["category"] == name for row in rows)
    )
    order = tuple(dict.fromkeys(bar["bar"] for bar in bars))
    names = tuple(
        labels[rank] for rank in labels if any(bar["label"] == labels[rank] for bar in bars)
    )
    return Figure(
        name="memory",
        title=f"Peak memory by rank ({unit})",
        subtitle=" · ".join(
            [memory_subtitle(profiles, capacity, near, largest), *category_notes(bars)]
        ),
        spec=memory_spec(
            unit,
            categories,
            chart_data.seen_parts(list(map(palette.category_label, categories)), rows, "called"),
            names,
            order,
            capacity_label_side(near, largest),
        ),
        rows=rows,
    )


MemoryPart = tuple[int, str, float]
"""Sampled step (-1: none), category and bytes: one row of a rank's memory."""


def rank_bars(profile: Profile, name: str, labels: dict[int, str]) -> list[dict[str, Any]]:
    """One bar a rank: its total and its categories in bytes, of the sampled step with the largest
    total.
    """
    parts = peak_parts_by_rank(profile)
    by_rank = {rank: parts.get(profile.representative.get(rank, rank)) for rank in labels}
    return [
        {"label": labels[rank], "bar": name, "source": profile.source, **largest_sample(own)}
        for rank, own in by_rank.items()
        if own
    ]


def peak_parts_by_rank(profile: Profile) -> dict[int, list[MemoryPart]]:
    """What each rank holds on its device at its peaks."""
    frame = profile.memory
    here = (frame.tier.to_numpy() == "device") & (frame.moment.to_numpy() == "peak")
    columns = (
        frame[name].to_numpy()[here].tolist() for name in ("rank", "step", "category", "bytes")
    )
    found: dict[int, list[MemoryPart]] = {}
    for rank, step, category, size in zip(*columns):
        if size > 0:
            at = rank_selection.int_or_none(step)
            found.setdefault(int(rank), []).append((-1 if at is None else at, str(category), size))
    return found


def largest_sample(parts: list[MemoryPart]) -> dict[str, Any]:
    """Total, categories (bytes) and step of one rank's sampled step with the largest total."""
    allocated, by_category = bytes_by_step(parts, ALLOCATED), bytes_by_step(parts)
    counted = {
        step: sum(own.values()) + sum(by_category.get(step, {}).get(n, 0) for n in NOT_ALLOCATED)
        for step, own in allocated.items()
    }
    sampled = counted or {step: sum(own.values()) for step, own in by_category.items()}
    step = max(sorted(sampled), key=lambda at: sampled[at])
    categories = {name: int(size) for name, size in by_category.get(step, {}).items()}
    total = int(sampled[step]) if allocated else sum(categories.values())
    if total > sum(categories.values()):
        categories[UNATTRIBUTED] = total - sum(categories.values())
    return {"total": total, "categories": categories, "step": None if step == -1 else step}


def bytes_by_step(parts: list[MemoryPart], only: str = "") -> dict[int, dict[str, float]]:
    """Step -> category -> bytes; of the category `only`, or of all but measured totals."""
    found: dict[int, dict[str, float]] = {}
    for step, category, size in parts:
        if (category == only) if only else (category != ALLOCATED):
            own = found.setdefault(step, {})
            own[category] = own.get(category, 0) + size
    return found


def bar_rows(bar: dict[str, Any], size: int, bar_label: str) -> list[dict[str, Any]]:
    """Rows of one bar, in units of `size` bytes; the first carries the text beside the bar,
    `bar_label` among it.
    """
    common_cells = {k: bar[k] for k in ("label", "bar", "source", "step")} | {
        "total": bar["total"] / size
    }
    rows: list[dict[str, Any]] = []
    for order, name in enumerate(palette.MEMORY_COLOURS):
        if name in bar["categories"]:
            value = bar["categories"][name]
            text = " ".join([digits(bar["total"] / size), bar_label]).strip() if not rows else None
            rows.append(
                common_cells
                | {
                    "category": name,
                    "called": palette.category_label(name),
                    "order": order,
                    "value": value / size,
                    "text": text,
                    "share": value / bar["total"],
                }
                | {"meaning": MEANINGS.get(name, REST)}
            )
    return rows


def capacity_cells(unit: str, size: int, reach: float, capacity: int | None) -> dict[str, Any]:
    """Cells of the first row alone: the GPU's memory, its label, and how far the axis reaches
    (bars have text beside them).
    """
    found: dict[str, Any] = {"axis_reach": max(reach, (capacity or 0) * 1.02) / size}
    if capacity:
        found |= {
            "capacity": capacity / size,
            "capacity_text": f"GPU memory: {digits(capacity / size)} {unit}",
        }
    return found


def capacity_label_side(capacity: int | None, largest: float) -> Literal["left", "right", ""]:
    """On which side of the line at a GPU's memory its label fits; "" where there is no
    line.
    """
    if not capacity:
        return ""
    return "right" if capacity < largest / 2 else "left"


def memory_subtitle(
    profiles: Sequence[Profile], capacity: int | None, near: int | None, largest: int
) -> str:
    """The subtitle: sources, and where the GPU's capacity is off the chart, what it is."""
    text = chart_data.source_words(profiles)
    if capacity and not near:
        text += (
            f" · peak memory is {digits(100 * largest / capacity, 2)} % of {bytes_text(capacity)}"
        )
    return text


def category_notes(bars: Sequence[dict[str, Any]]) -> list[str]:
    """What `EXPLAINED_CATEGORIES` says of the categories that can be seen in a bar."""
    return [
        f"{palette.category_label(name)}: {meaning}"
        for name, meaning in EXPLAINED_CATEGORIES.items()
        if any(bar["categories"].get(name, 0) >= MIN_EXPLAINED_SHARE * bar["total"] for bar in bars)
    ]


@lru_cache(maxsize=64)
def memory_spec(
    unit: str,
    categories: tuple[str, ...],
    seen: tuple[str, ...],
    labels: tuple[str, ...],
    bars: tuple[str, ...],
    capacity_side: Literal["left", "right", ""],
) -> dict[str, Any]:
    """The declaration: a bar for each of `bars` in each of `labels`. Values are in the rows.

    `seen`: the categories that the legend lists, as they are called.
    `capacity_side`: on which side of the line at the GPU's memory its label stands.
    """
    y = alt.Y("label:N", sort=list(labels), axis=chart_data.name_axis())
    offset = alt.YOffset("bar:N", sort=list(bars), scale=alt.Scale(paddingInner=0.12))
    x = alt.X(
        "value:Q",
        title=unit,
        stack="zero",
        scale=alt.Scale(nice=False),
        axis=chart_data.amount_axis(),
    )
    colour = alt.Scale(
        domain=[palette.category_label(name) for name in categories],
        range=[palette.MEMORY_COLOURS[name] for name in categories],
    )
    base = alt.Chart(chart_data.ROWS).encode(y=y, yOffset=offset)
    stack = base.mark_bar(stroke="white", strokeWidth=0.6, strokeOpacity=0.5).encode(
        x=x,
        color=alt.Color(
            "called:N", scale=colour, legend=chart_data.bottom_legend(seen, beside=labels)
        ),
        order=alt.Order("order:Q"),
        tooltip=[
            alt.Tooltip("label:N", title="where"),
            alt.Tooltip("bar:N", title="source"),
            "step:Q",
            alt.Tooltip("called:N", title="category"),
            alt.Tooltip("value:Q", title=unit, format=",.3~f"),
            alt.Tooltip("share:Q", format=".1%"),
            alt.Tooltip("meaning:N", title="meaning"),
        ],
    )
    totals = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    layers: list[Any] = [stack, totals.encode(x=alt.X("total:Q"), text="text:N")]
    layers += (
        chart_data.limit_marker("capacity", "capacity_text", capacity_side) if capacity_side else []
    )
    layers.append(
        alt.Chart(chart_data.ROWS)
        .transform_filter("isValid(datum.axis_reach)")
        .mark_point(opacity=0)
        .encode(x="axis_reach:Q")
    )
    return vega_spec(alt.layer(*layers), height=max(60, len(labels) * (len(bars) * BAR_HEIGHT + 7)))
