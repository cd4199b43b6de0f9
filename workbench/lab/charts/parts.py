"""Where a step's time goes, part by part."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import common
from workbench.lab.figure import Figure, declare
from workbench.lab.units import seconds_text, time_unit
from workbench.profile import Profile

NOTE = "time"
"""Key of `Profile.notes` under which an instrument gives seconds by part."""


def parts(*profiles: Profile) -> Figure:
    """One bar a profile: seconds of a step by part; where parts are unknown, the whole step."""
    told = list(zip(common.names_of(profiles), map(parts_of, profiles)))
    told = [(name, found) for name, found in told if found]
    unit, size = time_unit(sum(found.values()) for _, found in told)
    names = tuple(dict.fromkeys(part for _, found in told for part in found))
    rows = [
        {"bar": bar, "part": palette.words(part), "order": names.index(part), "value": seconds / size,
         "total": sum(found.values()) / size, "text": seconds_text(sum(found.values())) if i == 0 else None}
        for bar, found in told for i, (part, seconds) in enumerate(found.items())
    ]  # fmt: skip
    return Figure(
        name="parts",
        title=f"Where the time of a step goes ({unit})",
        subtitle=common.sources(profiles),
        spec=spec(unit, tuple(palette.words(name) for name in names), tuple(bar for bar, _ in told)),
        rows=rows,
        empty="No step time is known.",
    )


def parts_of(profile: Profile) -> dict[str, float]:
    """Part -> seconds, in the instrument's order."""
    note = profile.notes.get(NOTE)
    if isinstance(note, dict):
        return {str(k): float(v) for k, v in note.items() if isinstance(v, int | float) and v > 0}
    return {"whole step": profile.step_seconds} if profile.step_seconds else {}


@lru_cache(maxsize=32)
def spec(unit: str, names: tuple[str, ...], bars: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: a bar for each of `bars`, stacked by part."""
    colours = [palette.PARTS[i % len(palette.PARTS)] for i in range(len(names))]
    base = alt.Chart(common.ROWS).encode(y=alt.Y("bar:N", sort=list(bars), axis=common.names()))
    stack = base.mark_bar(stroke="white", strokeWidth=0.6).encode(
        x=alt.X("value:Q", title=f"{unit} a step", stack="zero", scale=alt.Scale(nice=False), axis=common.amounts()),
        color=alt.Color("part:N", scale=alt.Scale(domain=list(names), range=colours), legend=common.legend(3)),
        order="order:Q",
        tooltip=[alt.Tooltip("bar:N", title="where"), "part:N", alt.Tooltip("value:Q", title=unit, format=",.4~r")],
    )
    text = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    room = alt.Chart(common.ROWS).transform_calculate(room="datum.total * 1.2").mark_point(opacity=0).encode(x="room:Q")
    return declare(alt.layer(stack, text.encode(x="total:Q", text="text:N"), room), height=max(50, 26 * len(bars)))
