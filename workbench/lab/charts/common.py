"""What the charts share: their data, who said the numbers, and the form of legends and marks."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from workbench.lab import palette
from workbench.lab.figure import DATA
from workbench.profile import Profile

ROWS = alt.NamedData(DATA)


def sources(profiles: Sequence[Profile]) -> str:
    """Who says what a chart shows, for its subtitle: 'estimated · measured'."""
    found = {profile.source for profile in profiles}
    return " · ".join(name for name in palette.SOURCES if name in found) or "no source"


def names_of(profiles: Sequence[Profile]) -> list[str]:
    """What each profile's bars are called: the source, and the run too where one source speaks of several."""
    several = len({profile.source for profile in profiles}) < len(profiles)
    names = [f"{profile.source} · {profile.run}" if several else profile.source for profile in profiles]
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def runs(profiles: Sequence[Profile]) -> list[str]:
    """Names of the runs, each once, in order."""
    return list(dict.fromkeys(profile.run for profile in profiles))


def marker(place: str, words: str) -> list[alt.Chart]:
    """A dashed vertical rule where a row has the field `place`, with the field `words` at its top."""
    base = alt.Chart(ROWS).transform_filter(f"isValid(datum.{place})").encode(x=f"{place}:Q")
    rule = base.mark_rule(color=palette.LIMIT, strokeDash=[5, 3], strokeWidth=1.5)
    text = base.mark_text(color=palette.LIMIT, align="right", baseline="bottom", dx=-4, dy=-3, fontSize=11)
    return [rule, text.encode(y=alt.value(0), text=f"{words}:N")]


def legend(columns: int = 3, symbol: str = "square") -> alt.Legend:
    """The one place and form of legends: under the chart, without a title."""
    width = 2.5 if symbol == "stroke" else 0
    return alt.Legend(
        title=None,
        orient="bottom",
        columns=columns,
        symbolType=symbol,
        symbolSize=90,
        symbolStrokeWidth=width,
        labelLimit=0,
        offset=6,
    )


def names(title: str | None = None) -> alt.Axis:
    """The axis of names left of horizontal bars."""
    return alt.Axis(title=title, labelLimit=240, labelPadding=7, ticks=False, domain=False)


def amounts() -> alt.Axis:
    """The axis below horizontal bars: few ticks, so that their numbers stay apart on a narrow page."""
    return alt.Axis(tickCount=6)
