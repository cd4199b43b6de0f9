"""Step time by part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.units import seconds_text, time_unit

TIME_NOTE = "time"
"""Key of `Profile.notes` under which an instrument gives seconds by part."""


def step_time_parts(*profiles: Profile, names: Sequence[str] = ()) -> Figure:
    """Step time by part, one bar a profile.

    Args:
        profiles: Estimates give seconds by part in their notes; a measured step is split by its
            timeline. One without either has a single part.
        names: Names of the bars; default the sources, and the runs where several share a source.
    """
    bars = list(zip(names or chart_data.bar_names(profiles), map(seconds_by_part, profiles)))
    bars = [(name, found) for name, found in bars if found]
    unit, size = time_unit(sum(found.values()) for _, found in bars)
    parts = tuple(dict.fromkeys(part for _, found in bars for part in found))
    rows = [
        {
            "bar": bar,
            "part": palette.key_label(part),
            "order": parts.index(part),
            "value": seconds / size,
            "total": sum(found.values()) / size,
            "text": seconds_text(sum(found.values())) if i == 0 else None,
        }
        for bar, found in bars
        for i, (part, seconds) in enumerate(found.items())
    ]
    return Figure(
        name="parts",
        title=f"Step time by part ({unit})",
        subtitle=chart_data.source_words(profiles),
        spec=step_time_spec(
            unit,
            parts,
            chart_data.seen_parts([palette.key_label(part) for part in parts], rows, "part"),
            tuple(bar for bar, _ in bars),
        ),
        rows=rows,
        empty="No step time is known.",
    )


IDLE, WHOLE_STEP = "idle", "step time"
"""Parts of a measured step: time without an action, and all of it where no timeline is known."""


def seconds_by_part(profile: Profile) -> dict[str, float]:
    """Part -> seconds, in the instrument's order; of a measured step what its timeline says,
    averaged over ranks.
    """
    note = profile.notes.get(TIME_NOTE)
    if isinstance(note, dict):
        return {str(k): float(v) for k, v in note.items() if isinstance(v, int | float) and v > 0}
    if len(profile.timeline):
        return seconds_by_action(profile.timeline)
    return {WHOLE_STEP: profile.step_seconds} if profile.step_seconds else {}


def seconds_by_action(timeline: pd.DataFrame) -> dict[str, float]:
    """Action -> seconds of the last step with a timeline, the mean of the ranks that have one; the
    rest is idle.
    """
    last = (
        timeline[timeline.step == timeline.step.max()] if timeline.step.notna().any() else timeline
    )
    span, ranks = float(last.end.max()), last["rank"].nunique()
    titles = last.action.map(lambda name: palette.action_style(str(name))[0])
    own = ((last.end - last.start).groupby(titles).sum() / ranks).to_dict()
    order = dict.fromkeys(
        title for title, _ in (*palette.ACTION_STYLES.values(), palette.OTHER_ACTION_STYLE)
    )
    found = {title: float(own[title]) for title in order if own.get(title, 0) > 0}
    rest = span - sum(found.values())
    return found | ({IDLE: rest} if rest > 0 else {})


@lru_cache(maxsize=32)
def step_time_spec(
    unit: str, names: tuple[str, ...], seen: tuple[str, ...], bars: tuple[str, ...]
) -> dict[str, Any]:
    """The declaration: a bar for each of `bars`, stacked by part; the legend lists `seen`."""
    titles, colours = (
        [palette.key_label(name) for name in names],
        [palette.STEP_PART_COLOURS.get(n, palette.OTHER_PART_COLOUR) for n in names],
    )
    base = alt.Chart(chart_data.ROWS).encode(
        y=alt.Y("bar:N", sort=list(bars), axis=chart_data.name_axis())
    )
    stack = base.mark_bar(stroke="white", strokeWidth=0.6).encode(
        x=alt.X(
            "value:Q",
            title=f"step time ({unit})",
            stack="zero",
            scale=alt.Scale(nice=False),
            axis=chart_data.amount_axis(),
        ),
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=titles, range=colours),
            legend=chart_data.bottom_legend(seen, beside=bars),
        ),
        order="order:Q",
        tooltip=[
            alt.Tooltip("bar:N", title="where"),
            "part:N",
            alt.Tooltip("value:Q", title=unit, format=",.4~r"),
        ],
    )
    text = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    axis_end = (
        alt.Chart(chart_data.ROWS)
        .transform_calculate(axis_end="datum.total * 1.2")
        .mark_point(opacity=0)
        .encode(x="axis_end:Q")
    )
    return vega_spec(
        alt.layer(stack, text.encode(x="total:Q", text="text:N"), axis_end),
        height=max(50, 26 * len(bars)),
    )
