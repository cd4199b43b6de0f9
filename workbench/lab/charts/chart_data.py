"""Shared by the charts: their data, the source of the numbers, the form of legends and marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from workbench.lab import palette
from workbench.lab.live.figure import DATA
from workbench.profile import Profile

ROWS = alt.NamedData(DATA)


def source_words(profiles: Sequence[Profile]) -> str:
    """Sources of the numbers, for a chart's subtitle: 'estimated · measured'."""
    found = {profile.source for profile in profiles}
    return " · ".join(name for name in palette.SOURCE_COLOURS if name in found) or "no source"


def bar_names(profiles: Sequence[Profile], letters: int = 0) -> list[str]:
    """Names of the profiles' bars: the source, and the run too where several share a source; of
    runs that are longer than `letters` (default `MAX_NAME_LETTERS`) the words that are not of all.
    No two are equal.
    """
    letters = letters or MAX_NAME_LETTERS
    several = len({profile.source for profile in profiles}) < len(profiles)
    names = _named(profiles, [profile.run if several else "" for profile in profiles])
    if max(map(len, names), default=0) > letters:
        named = _named(profiles, own_words([profile.run for profile in profiles]))
        names = [shortened(name, letters) for name in named]
    return [
        name
        if names.count(name) == 1
        else f"{shortened(name, letters - 4)} ({names[:i].count(name) + 1})"
        for i, name in enumerate(names)
    ]


def _named(profiles: Sequence[Profile], runs: Sequence[str]) -> list[str]:
    return [f"{p.source} · {run}" if run else p.source for p, run in zip(profiles, runs)]


def own_words(names: Sequence[str]) -> list[str]:
    """Names without the words with which all of them begin, and those with which all end."""
    words = [name.split(" ") for name in names]
    if len(set(names)) < 2:
        return list(names)
    first = _shared(words)
    last = _shared([found[: first - 1 : -1] if first else found[::-1] for found in words])
    return [" ".join(found[first : len(found) - last]) or name for found, name in zip(words, names)]


def _shared(words: Sequence[Sequence[str]]) -> int:
    """Words with which all begin."""
    found = 0
    while all(len(own) > found for own in words) and len({own[found] for own in words}) == 1:
        found += 1
    return found


def shortened(name: str, letters: int) -> str:
    """A name with its middle left out where it is longer."""
    half = (letters - 1) // 2
    return name if len(name) <= letters else f"{name[:half]}…{name[-half:]}"


MIN_SEEN_SHARE = 0.005
"""Share of the longest bar from which a part of a bar can be seen: a pixel of 200."""


def seen_parts(parts: Sequence[str], rows: Sequence[dict[str, Any]], field: str) -> tuple[str, ...]:
    """Entries of `parts` that can be seen in a bar: a legend lists no other."""
    least = MIN_SEEN_SHARE * max((row["total"] for row in rows), default=0)
    seen = {row[field] for row in rows if row["value"] > least}
    return tuple(part for part in parts if part in seen)


def run_names(profiles: Sequence[Profile]) -> list[str]:
    """Names of the runs, each once, in order."""
    return list(dict.fromkeys(profile.run for profile in profiles))


def limit_marker(
    field: str, text_field: str, align: Literal["left", "right"] = "right"
) -> list[alt.Chart]:
    """A vertical rule at the value of `field`, labelled with `text_field` on its `align` side.

    Args:
        field: Field of the rows that holds the x value; rows without it draw nothing.
        text_field: Field of the rows that holds the label.
        align: Side of the rule on which the label stands.
    """
    base = alt.Chart(ROWS).transform_filter(f"isValid(datum.{field})").encode(x=f"{field}:Q")
    # A light edge keeps the rule visible on bars of any colour.
    edge = base.mark_rule(color="white", strokeWidth=6, opacity=0.9)
    rule = base.mark_rule(color=palette.LIMIT_COLOUR, strokeWidth=2.5)
    text = base.mark_text(
        color=palette.LIMIT_COLOUR,
        align="left" if align == "right" else "right",
        baseline="bottom",
        dy=-3,
        fontSize=11,
        fontWeight="bold",
    )
    return [edge, rule, text.encode(y=alt.value(0), text=f"{text_field}:N")]


def text_room() -> alt.Chart:
    """An unseen mark right of the rows' `text` beside bars of `total`: the axis reaches it, so that
    a narrow chart does not cut the text.
    """
    rows = alt.Chart(ROWS).transform_filter("datum.text != null")
    ends = rows.transform_calculate(axis_end="datum.total * (1.05 + datum.text.length / 20)")
    found: alt.Chart = ends.mark_point(opacity=0).encode(x="axis_end:Q")
    return found


LETTER_WIDTH, SYMBOL_WIDTH = 5.8, 27.0
"""Width of a letter of a legend, and of a legend's symbol with the gaps around it, in pixels."""
MAX_NAMES_WIDTH = 240
"""Pixels that the names left of bars may take."""
MAX_NAME_LETTERS = 38
"""Letters of a bar's name that those pixels hold."""
NARROW_WIDTH, FULL_WIDTH = 345, 700
"""Pixels of the narrowest place that a board gives a chart, and one that has a line of its own."""


def bottom_legend(
    labels: Sequence[str],
    symbol: str = "square",
    width: int = NARROW_WIDTH,
    beside: Sequence[str] = (),
) -> alt.Legend:
    """A legend under the chart, without a title, in as many columns as fit.

    Args:
        labels: The legend's entries; the longest sets the width of a column.
        symbol: Vega's symbol type.
        width: Pixels of the chart with all that belongs to it.
        beside: Names left of the bars, which take their part of `width`.
    """
    column = SYMBOL_WIDTH + LETTER_WIDTH * max(map(len, labels), default=0)
    width -= min(MAX_NAMES_WIDTH, int(5.2 * max(map(len, beside), default=6))) + 12
    stroke = 2.5 if symbol == "stroke" else 0
    return alt.Legend(
        title=None,
        orient="bottom",
        columns=max(1, min(8, int(width / column))),
        values=list(labels),
        symbolType=symbol,
        symbolSize=90,
        symbolStrokeWidth=stroke,
        labelLimit=0,
        offset=6,
    )


def name_axis(title: str | None = None) -> alt.Axis:
    """The axis of names left of horizontal bars."""
    return alt.Axis(
        title=title, labelLimit=MAX_NAMES_WIDTH, labelPadding=7, ticks=False, domain=False
    )


def amount_axis() -> alt.Axis:
    """The axis below horizontal bars: few ticks, so that their numbers stay apart on a narrow
    page.
    """
    return alt.Axis(tickCount=6)
