"""Line charts over steps: which points are drawn, and when ranks become a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import altair as alt
import pandas as pd

from workbench.lab import palette, rank_selection
from workbench.lab.charts import chart_data

RANK_PREFIX, MEDIAN = "rank ", "median"
NUM_OUTLIERS = 3
MAX_POINTS = 500
"""Most points of a line; longer runs are drawn at every second, third … step."""


def series_rows(
    values: pd.DataFrame, world_size: int, worst: Literal["largest", "smallest"]
) -> list[dict[str, Any]]:
    """Rows of a line chart from a frame (rank, step, value).

    Up to 16 ranks: every rank's value. Beyond: minimum, median and maximum of each step, and the
    `worst` three ranks.
    """
    values = thin_steps(values)
    if world_size <= rank_selection.MAX_RANKS_SHOWN:
        return [
            {"step": int(s), "rank": f"{RANK_PREFIX}{r}", "value": v}
            for r, s, v in zip(values["rank"], values.step, values.value)
        ]
    band = values.groupby("step").value.agg(low="min", value="median", high="max").reset_index()
    cells = zip(band.step, band.low, band.value, band.high)
    found: list[dict[str, Any]] = [
        {"step": step, "low": low, "value": value, "high": high, "rank": MEDIAN}
        for step, low, value, high in cells
    ]
    middle = values.groupby("rank").value.median()
    extreme = (
        middle.nlargest(NUM_OUTLIERS) if worst == "largest" else middle.nsmallest(NUM_OUTLIERS)
    )
    chosen = values[values["rank"].isin(extreme.index)]
    return found + [
        {"step": s, "rank": f"{RANK_PREFIX}{r}", "value": v}
        for r, s, v in zip(chosen["rank"], chosen.step, chosen.value)
    ]


def thin_steps(values: pd.DataFrame) -> pd.DataFrame:
    """At most `MAX_POINTS` steps, evenly spaced, the last one among them."""
    steps = values.step.drop_duplicates().sort_values()
    stride = -(-len(steps) // MAX_POINTS) if len(steps) else 1
    return values if stride == 1 else values[values.step.isin(steps.iloc[::-stride])]


def series_names(rows: Sequence[dict[str, Any]], world_size: int) -> tuple[str, ...]:
    """Names of the lines of `series_rows`: all ranks, or beyond 16 the median and the ranks that
    stand out.
    """
    if world_size <= rank_selection.MAX_RANKS_SHOWN:
        return tuple(f"{RANK_PREFIX}{number}" for number in range(world_size))
    found = {str(row["rank"]) for row in rows}
    return (MEDIAN, *sorted(found - {MEDIAN}, key=lambda name: int(name.removeprefix(RANK_PREFIX))))


def line_chart(
    unit: str, names: Sequence[str], point: bool = False
) -> alt.LayerChart | alt.FacetChart:
    """Lines of `value` by step, one for each of `names`; with a median, the range of all ranks
    behind them.

    A rank has the same colour in every chart. A line of one step is drawn as a point.
    """
    own = [int(name.removeprefix(RANK_PREFIX)) for name in names if name != MEDIAN]
    colours, dashes = palette.line_styles(own)
    if MEDIAN in names:
        colours, dashes = [palette.NEUTRAL_COLOUR, *colours], [[1, 0], *dashes]
    x = alt.X("step:Q", title="step", scale=alt.Scale(zero=False, nice=False), axis=step_axis())
    y = alt.Y(
        "value:Q",
        title=unit,
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format="~s" if unit == "tokens/s" else "~f"),
    )
    colour = alt.Color(
        "rank:N",
        scale=alt.Scale(domain=list(names), range=colours),
        legend=chart_data.bottom_legend(names, "stroke"),
    )
    base = alt.Chart(chart_data.ROWS).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=["rank:N", "step:Q", alt.Tooltip("value:Q", title=unit, format=",.4~r")],
    )
    dash = alt.StrokeDash("rank:N", scale=alt.Scale(domain=list(names), range=dashes), legend=None)
    line = base.mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14) if point else False)
    layers = [line.encode(strokeDash=dash), single_points(base, "rank")]
    if MEDIAN in names:
        area = alt.Chart(chart_data.ROWS).transform_filter(f"datum.rank == '{MEDIAN}'")
        area = area.mark_area(opacity=0.2, color=palette.NEUTRAL_COLOUR)
        layers.insert(0, area.encode(x=x, y=alt.Y("low:Q", title=unit), y2="high:Q"))
    return alt.layer(*layers)


def single_points(base: alt.Chart, series: str) -> alt.Chart:
    """Points where a line has one step only, which a line mark does not draw."""
    counted = base.transform_joinaggregate(points="count()", groupby=[series])
    points: alt.Chart = counted.transform_filter("datum.points == 1").mark_point(
        filled=True, size=40
    )
    return points


def step_axis() -> alt.Axis:
    """An axis of whole steps: ticks between two steps stay without a word."""
    return alt.Axis(tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label", format="~d")
