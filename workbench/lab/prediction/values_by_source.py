"""One number of several plans: what was guessed, predicted, measured and published of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.units import digits

BAR_HEIGHT, GROUP_GAP = 14, 9
"""Pixels of a bar, and between the bars of two names."""


def values_by_source(
    title: str, unit: str, values: Mapping[str, Mapping[str, float]], note: str = ""
) -> Figure:
    """A bar for each source of each number.

    Args:
        title: What the numbers are.
        unit: Their unit.
        values: Name (of a plan) -> source -> number. Sources are estimated, rehearsed, measured,
            published, and what the reader guessed: `palette.ANSWER_COLOURS` has them in order.
        note: More words for the subtitle, such as where published numbers are from.
    """
    rows = [
        {
            "name": name,
            "source": source,
            "value": number,
            "end": max(number, 0),
            "text": f"{digits(number)} {source}",
        }
        for name, numbers in values.items()
        for source, number in numbers.items()
    ]
    found = tuple(s for s in palette.ANSWER_COLOURS if any(row["source"] == s for row in rows))
    return Figure(
        name="values",
        title=f"{title} ({unit})",
        subtitle=" · ".join([*found, *([note] if note else [])]),
        spec=values_spec(unit, tuple(values), found),
        rows=rows,
    )


@lru_cache(maxsize=64)
def values_spec(unit: str, names: tuple[str, ...], sources: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: a bar for each of `sources` in each of `names`."""
    colours = [palette.ANSWER_COLOURS[name] for name in sources]
    base = alt.Chart(chart_data.ROWS).encode(
        y=alt.Y("name:N", sort=list(names), axis=chart_data.name_axis()),
        yOffset=alt.YOffset("source:N", sort=list(sources), scale=alt.Scale(paddingInner=0.12)),
        x=alt.X("value:Q", title=unit, axis=chart_data.amount_axis()),
    )
    colour = alt.Color(
        "source:N", scale=alt.Scale(domain=list(sources), range=colours), legend=None
    )
    tooltip = ["name:N", "source:N", alt.Tooltip("value:Q", title=unit, format=",.4~r")]
    bars = base.mark_bar().encode(color=colour, tooltip=tooltip)
    text = base.mark_text(align="left", dx=5, fontSize=11).encode(x="end:Q", text="text:N")
    reach = (
        alt.Chart(chart_data.ROWS)
        .transform_calculate(reach="datum.value * 1.25")
        .mark_point(opacity=0)
        .encode(x="reach:Q")
    )
    height = len(names) * (len(sources) * BAR_HEIGHT + GROUP_GAP)
    return vega_spec(alt.layer(bars, text, reach), height=max(50, height))
