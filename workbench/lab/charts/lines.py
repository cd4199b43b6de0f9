"""What line charts over steps share: which points are kept, and how many ranks become a band."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt
import pandas as pd

from workbench.lab import palette, ranks
from workbench.lab.charts import common

WORST = 3
POINTS = 500
"""Most points of a line; longer runs are drawn at every second, third … step."""


def rows(values: pd.DataFrame, world_size: int, worst: Literal["largest", "smallest"]) -> list[dict[str, Any]]:
    """Rows of a line chart from a frame (rank, step, value).

    Up to 16 ranks: every rank's value. Beyond: minimum, median and maximum of each step, and the `worst` three ranks.
    """
    values = thin(values)
    if world_size <= ranks.FEW:
        return [
            {"step": int(s), "rank": f"rank {r}", "value": v}
            for r, s, v in zip(values["rank"], values.step, values.value)
        ]
    band = values.groupby("step").value.agg(low="min", value="median", high="max").reset_index()
    cells = zip(band.step, band.low, band.value, band.high)
    found: list[dict[str, Any]] = [
        {"step": step, "low": low, "value": value, "high": high, "rank": "median"} for step, low, value, high in cells
    ]
    middle = values.groupby("rank").value.median()
    extreme = middle.nlargest(WORST) if worst == "largest" else middle.nsmallest(WORST)
    chosen = values[values["rank"].isin(extreme.index)]
    return found + [
        {"step": s, "rank": f"rank {r}", "value": v} for r, s, v in zip(chosen["rank"], chosen.step, chosen.value)
    ]


def thin(values: pd.DataFrame) -> pd.DataFrame:
    """At most `POINTS` steps, evenly spaced, the last one among them."""
    steps = values.step.drop_duplicates().sort_values()
    stride = -(-len(steps) // POINTS) if len(steps) else 1
    return values if stride == 1 else values[values.step.isin(steps.iloc[::-stride])]


def chart(unit: str, band: bool, point: bool = False) -> alt.LayerChart | alt.FacetChart | alt.Chart:
    """Lines of `value` by step, coloured by rank; with `band` the range of all ranks behind the few that stand out."""
    scale = alt.Scale(range=list(palette.SERIES))
    x = alt.X("step:Q", title="step", scale=alt.Scale(zero=False, nice=False), axis=steps_axis())
    y = alt.Y(
        "value:Q", title=unit, scale=alt.Scale(zero=True), axis=alt.Axis(format="~s" if unit == "tokens/s" else "~f")
    )
    tooltip = ["rank:N", "step:Q", alt.Tooltip("value:Q", title=unit, format=",.4~r")]
    colour = alt.Color("rank:N", scale=scale, sort=None, legend=common.legend(8, "stroke"))
    drawn = (
        alt.Chart(common.ROWS)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14) if point else False)
        .encode(x=x, y=y, color=colour, tooltip=tooltip)
    )
    if not band:
        return drawn
    area = (
        alt.Chart(common.ROWS)
        .transform_filter("datum.rank == 'median'")
        .mark_area(opacity=0.2, color=palette.SERIES[0])
    )
    return alt.layer(area.encode(x=x, y=alt.Y("low:Q", title=unit), y2="high:Q"), drawn)


def steps_axis() -> alt.Axis:
    """An axis of whole steps: ticks between two steps stay without a word."""
    return alt.Axis(tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label", format="~d")
