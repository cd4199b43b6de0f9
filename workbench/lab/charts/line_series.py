"""Line charts over steps: which points are drawn, and when ranks become a band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt
import pandas as pd

from workbench.lab import palette, rank_selection
from workbench.lab.charts import chart_data
from workbench.profile import Profile
from workbench.runs.store.record_thinning import extremes
from workbench.runs.store.telemetry_frames import ONE_STEP_OF

RANK_PREFIX, MEDIAN = "rank ", "median"
NUM_OUTLIERS = 3
MAX_POINTS = 500
"""Most points of a line; of longer runs the smallest and the largest of each part are drawn."""


def series_rows(
    values: pd.DataFrame, world_size: int, worst: Literal["largest", "smallest"], width: int = 1
) -> list[dict[str, Any]]:
    """Rows of a line chart from a frame (rank, step, value, and `open` where rows may go again).

    Up to 16 ranks: every rank's values, thinned to parts of `width` steps or more. Beyond: the
    range of all ranks in each part, its median over ranks, and the `worst` three ranks. A value
    that is not finite is None.
    """
    width = step_width(values.step, width)
    if world_size <= rank_selection.MAX_RANKS_SHOWN:
        return _rank_rows(thin_steps(values, width))
    middle = values.groupby("rank").value.median()
    end = float("inf") if worst == "largest" else float("-inf")
    middle[values[~_is_finite(values)]["rank"].unique()] = end
    extreme = (
        middle.nlargest(NUM_OUTLIERS) if worst == "largest" else middle.nsmallest(NUM_OUTLIERS)
    )
    outliers = values[values["rank"].isin(extreme.index)].drop(columns="open", errors="ignore")
    return _band_rows(values, width) + _rank_rows(thin_steps(outliers, width))


def _rank_rows(values: pd.DataFrame) -> list[dict[str, Any]]:
    passing = values.get("open", [False] * len(values))
    cells = zip(values["rank"], values.step, values.value, passing)
    return [rank_row(int(rank), int(step), value, is_open) for rank, step, value, is_open in cells]


def rank_row(rank: int, step: int, value: float, is_open: bool) -> dict[str, Any]:
    """The row of one rank's value; `open` where it may go again."""
    row = {"step": step, "rank": f"{RANK_PREFIX}{rank}", "value": finite(value)}
    return row | {"open": True} if is_open else row


def _band_rows(values: pd.DataFrame, width: int) -> list[dict[str, Any]]:
    """Range of all ranks in each part of `width` steps, with the medians of what ranks have as
    their smallest and their largest there.
    """
    values = values[_is_finite(values)].reset_index(drop=True)
    part = (values.step // width).rename("part")
    of_rank, of_all = values.groupby([part, "rank"]).value, values.groupby(part).value
    ends = [
        values.loc[places].groupby(part)[["step", "value"]].median()
        for places in (of_rank.idxmin(), of_rank.idxmax())
    ]
    found = pd.concat(ends).drop_duplicates().sort_values("step")
    found = found.assign(low=of_all.min(), high=of_all.max())
    cells = zip(found.step, found.low, found.value, found.high)
    return [
        {"step": int(step), "low": low, "value": value, "high": high, "rank": MEDIAN}
        for step, low, value, high in cells
    ]


def _is_finite(values: pd.DataFrame) -> pd.Series[bool]:
    return values.value.abs() < math.inf


def finite(value: float) -> float | None:
    """A value as a chart's rows hold it: None where it is not finite."""
    return float(value) if math.isfinite(value) else None


def max_parts() -> int:
    """Most parts of which two points each, and the last, are drawn."""
    return (MAX_POINTS - 1) // 2


def step_width(steps: pd.Series, at_least: int = 1) -> int:
    """Steps of each part of which the smallest and the largest value are drawn: the least power of
    two, from `at_least`, of which `MAX_POINTS` points are enough; up to 2 nothing is left out.
    """
    parts, width = steps.drop_duplicates(), 1
    while width < at_least or (parts // width).nunique() > max_parts():
        width *= 2
    return width


def profile_width(profile: Profile, steps: pd.Series) -> int:
    """`step_width` of a profile's `steps`, of which some may have been left out as it was read."""
    return step_width(steps, profile.notes.get(ONE_STEP_OF, 1))


def thin_steps(values: pd.DataFrame, at_least: int = 1) -> pd.DataFrame:
    """The rows of a frame (rank, step, value) that are drawn: of each rank and each part of
    `step_width` steps the smallest, the largest and the first that is not finite, and its last.

    Thinning what is thinned, to a larger width too, gives what thinning all at once gives.
    """
    width = step_width(values.step, at_least)
    if width == 1 or not len(values):
        return values
    numbers = values.value.tolist()
    kept = set(values.reset_index(drop=True).groupby("rank").step.idxmax())
    groups = values.groupby([values["rank"], values.step // width], sort=False).indices.values()
    for group in groups:
        places = [int(place) for place in group]
        kept |= {places[i] for i in extremes([numbers[place] for place in places])}
    return values.iloc[sorted(kept)]


def step_title(width: int) -> str:
    """Title of the axis of steps: says how many are drawn of parts of `width` steps."""
    left_out = f" (1 of {width // 2:,} steps drawn, extremes kept)" if width > 2 else ""
    return f"step{left_out}"


def series_names(rows: Sequence[dict[str, Any]], world_size: int) -> tuple[str, ...]:
    """Names of the lines of `series_rows`: all ranks, or beyond 16 the median and the ranks that
    stand out.
    """
    if world_size <= rank_selection.MAX_RANKS_SHOWN:
        return tuple(f"{RANK_PREFIX}{number}" for number in range(world_size))
    found = {str(row["rank"]) for row in rows}
    return (MEDIAN, *sorted(found - {MEDIAN}, key=lambda name: int(name.removeprefix(RANK_PREFIX))))


def line_chart(
    unit: str, names: Sequence[str], width: int, point: bool = False
) -> alt.LayerChart | alt.FacetChart:
    """Lines of `value` by step, one for each of `names`; with a median, the range of all ranks
    behind them.

    A rank has the same colour in every chart. A line of one step is drawn as a point, a step
    without a finite value as a cross at the top. `width` is as in `step_title`.
    """
    own = [int(name.removeprefix(RANK_PREFIX)) for name in names if name != MEDIAN]
    colours, dashes = palette.line_styles(own)
    if MEDIAN in names:
        colours, dashes = [palette.NEUTRAL_COLOUR, *colours], [[1, 0], *dashes]
    x = step_position(width)
    y = alt.Y(
        "value:Q",
        title=unit,
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format="~s" if unit == "tokens/s" else "~f"),
    )
    # Both scales have the one legend: two that differ make Vega warn of each.
    legend = chart_data.bottom_legend(names, "stroke")
    colour = alt.Color("rank:N", scale=alt.Scale(domain=list(names), range=colours), legend=legend)
    base = alt.Chart(chart_data.ROWS).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=["rank:N", "step:Q", alt.Tooltip("value:Q", title=unit, format=",.4~r")],
    )
    dash = alt.StrokeDash(
        "rank:N", scale=alt.Scale(domain=list(names), range=dashes), legend=legend
    )
    line = base.mark_line(
        strokeWidth=1.8, strokeCap="round", point=alt.OverlayMarkDef(size=14) if point else False
    )
    layers = [
        not_finite(base, "value"),
        line.encode(strokeDash=dash),
        single_points(base, "rank", "value"),
    ]
    if MEDIAN in names:
        area = alt.Chart(chart_data.ROWS).transform_filter(f"datum.rank == '{MEDIAN}'")
        area = area.mark_area(
            fillOpacity=0.2,
            color=palette.NEUTRAL_COLOUR,
            stroke=palette.NEUTRAL_COLOUR,
            strokeWidth=0.7,
            strokeOpacity=0.7,
        )
        layers.insert(0, area.encode(x=x, y=alt.Y("low:Q", title=unit), y2="high:Q"))
    return alt.layer(*layers)


def single_points(base: alt.Chart, series: str, value: str) -> alt.Chart:
    """Points where a line has one `value` only, which a line mark does not draw."""
    counted = base.transform_joinaggregate(points=f"valid({value})", groupby=[series])
    points: alt.Chart = counted.transform_filter(
        f"datum.points == 1 && isValid(datum.{value})"
    ).mark_point(filled=True, size=40)
    return points


def not_finite(base: alt.Chart, value: str) -> alt.Chart:
    """Crosses above the steps whose `value` is not finite."""
    missing = base.transform_filter(f"datum.{value} === null")
    crosses: alt.Chart = missing.mark_point(shape="cross", size=36, filled=True).encode(
        y=alt.value(4), color=alt.value(palette.LIMIT_COLOUR)
    )
    return crosses


def step_position(width: int) -> alt.X:
    """The axis of whole steps, drawn as `step_title` says: ticks between two steps stay without a
    word.
    """
    axis = alt.Axis(tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label", format="~d")
    scale = alt.Scale(zero=False, nice=False)
    return alt.X("step:Q", title=step_title(width), scale=scale, axis=axis)
