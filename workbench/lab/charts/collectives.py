"""What the ranks send to each other, by axis."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.units import byte_unit, bytes_text
from workbench.vocabulary import SHOWN_NAMES

AXIS_ORDER = ("tensor", "sequence", "context", "expert", "data", "pipeline")


def collectives(*profiles: Profile) -> Figure:
    """Payload of the busiest rank's collectives in one step, by axis and kind; one bar a source.

    Args:
        profiles: Of one plan. `bytes` of their `collectives` are the full tensor's, per call.
    """
    bars_and_calls = list(zip(chart_data.bar_names(profiles), map(calls_of_busiest_rank, profiles)))
    unit, size = byte_unit(
        max(bytes_by_axis(calls).values()) for _, calls in bars_and_calls if calls
    )
    rows = [
        row
        for name, calls in bars_and_calls
        for row in axis_rows(name, calls, size, name if len(bars_and_calls) > 1 else "")
    ]
    kinds = tuple(
        name for name in palette.COLLECTIVE_COLOURS if any(row["kind"] == name for row in rows)
    )
    found = [row["axis"] for row in rows]
    axes = tuple(dict.fromkeys([*(axis for axis in AXIS_ORDER if axis in found), *found]))
    bars = tuple(dict.fromkeys(row["bar"] for row in rows))
    return Figure(
        name="collectives",
        title=f"Communication by parallel dimension ({unit})",
        subtitle=f"{chart_data.source_words(profiles)} · bytes per step, busiest rank",
        spec=collectives_spec(unit, kinds, chart_data.seen_parts(kinds, rows, "kind"), axes, bars),
        rows=rows,
        empty="No communication: every axis has one rank, or no step was sampled yet.",
    )


CollectiveCalls = tuple[str, str, float, float, float]
"""Axis, kind, payload bytes, calls, ranks of the group: one row of a rank's collectives."""


def calls_of_busiest_rank(profile: Profile) -> list[CollectiveCalls]:
    """Rows of the rank and step with the largest payload (bytes x count)."""
    frame = profile.collectives
    columns = ("rank", "step", "axis", "kind", "bytes", "count", "group_size")
    by_instant: dict[tuple[int, int], list[CollectiveCalls]] = {}
    for rank, step, axis, kind, size, count, ranks in zip(
        *(frame[name].tolist() for name in columns)
    ):
        instant = int(rank), -1 if step is None or step != step else int(step)
        by_instant.setdefault(instant, []).append(
            (SHOWN_NAMES.get(axis, axis), kind, float(size) * float(count), count, ranks)
        )
    return max(
        (by_instant[key] for key in sorted(by_instant)),
        key=lambda rows: sum(r[2] for r in rows),
        default=[],
    )


def axis_rows(
    bar: str, calls: list[CollectiveCalls], size: int, bar_label: str
) -> list[dict[str, Any]]:
    """One row an axis and kind, in units of `size` bytes; the first of an axis carries the words,
    `bar_label` among them.
    """
    groups: dict[tuple[str, str], list[CollectiveCalls]] = {}
    for call in calls:
        groups.setdefault((call[0], palette.collective_kind(str(call[1]))), []).append(call)
    totals = bytes_by_axis(calls)
    rows: list[dict[str, Any]] = []
    for (axis, kind), own in sorted(groups.items()):
        total = totals[axis] / size
        first = not any(row["axis"] == axis for row in rows)
        text = " ".join([bytes_text(total * size), bar_label]).strip() if first else None
        value = sum(call[2] for call in own) / size
        cells = {
            "axis": axis,
            "kind": kind,
            "bar": bar,
            "value": value,
            "total": total,
            "text": text,
        }
        counts = {
            "calls": int(sum(call[3] for call in own)),
            "ranks": int(max(call[4] for call in own)),
        }
        rows.append(cells | counts | {"order": list(palette.COLLECTIVE_COLOURS).index(kind)})
    return rows


def bytes_by_axis(calls: list[CollectiveCalls]) -> dict[str, float]:
    """Bytes of each axis."""
    totals: dict[str, float] = {}
    for axis, _, payload, *_ in calls:
        totals[axis] = totals.get(axis, 0.0) + payload
    return totals


@lru_cache(maxsize=64)
def collectives_spec(
    unit: str,
    kinds: tuple[str, ...],
    seen: tuple[str, ...],
    axes: tuple[str, ...],
    bars: tuple[str, ...],
) -> dict[str, Any]:
    """The declaration: a bar for each of `bars` in each of `axes`, stacked by kind of
    collective.
    """
    colour = alt.Scale(
        domain=list(kinds), range=[palette.COLLECTIVE_COLOURS[name] for name in kinds]
    )
    base = alt.Chart(chart_data.ROWS).encode(
        y=alt.Y("axis:N", sort=list(axes), axis=chart_data.name_axis()),
        yOffset=alt.YOffset("bar:N", sort=list(bars), scale=alt.Scale(paddingInner=0.12)),
    )
    stack = base.mark_bar(stroke="white", strokeWidth=0.5).encode(
        x=alt.X(
            "value:Q",
            title=f"{unit} per step",
            stack="zero",
            scale=alt.Scale(nice=False),
            axis=chart_data.amount_axis(),
        ),
        color=alt.Color("kind:N", scale=colour, legend=chart_data.bottom_legend(seen, beside=axes)),
        order="order:Q",
        tooltip=[
            alt.Tooltip("axis:N", title="dimension"),
            "kind:N",
            alt.Tooltip("bar:N", title="source"),
            alt.Tooltip("value:Q", title=unit, format=",.3~f"),
            alt.Tooltip("calls:Q", title="calls per step"),
            alt.Tooltip("ranks:Q", title="ranks in the group"),
        ],
    )
    text = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    layers = alt.layer(stack, text.encode(x="total:Q", text="text:N"), chart_data.text_room())
    return vega_spec(layers, height=max(50, len(axes) * (len(bars) * 16 + 10)))
