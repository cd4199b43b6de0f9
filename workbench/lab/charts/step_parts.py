"""Step time by part: the same parts for every instrument, of a run with its slowest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.charts.traced_ranks import Part, TracedSteps, common_parts
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile, batches_differ
from workbench.units import count_text, counted, seconds_text, time_unit

TIME_NOTE, TRACED_NOTE = "time", "traced"
"""Keys of `Profile.notes`: seconds by part of an estimate; `TracedSteps` where a live view has them
in place of a timeline.
"""
WHOLE_STEP = "step time"
"""The only part of a step of which no timeline is known."""
PER_TOKENS = 1e6
"""Tokens of whose time plans of different batches are compared."""


@dataclass
class StepBar:
    """One bar: its parts in order, and what its name says beside that of its profile."""

    profile: Profile
    parts: list[Part]
    words: str = ""
    traced: int = 0
    """Traced steps of which one stands here for all; 0: it is no traced step."""
    name: str = ""
    factor: float = 1.0
    """Times its seconds that are drawn."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(part.seconds for part in self.parts)


def step_time_parts(*profiles: Profile, names: Sequence[str] = ()) -> Figure:
    """Step time by part, one bar a profile; of a measured one the median rank and the slowest.

    Estimates alone are drawn in their own parts; beside a measured step, in the parts that both
    have. Steps that hold different numbers of tokens are drawn by the time of a million tokens.

    Args:
        profiles: Estimates give seconds by part in their notes; a measured step is split by its
            timeline. One without either has a single part; one that does not fit has none.
        names: Names of the bars; default the sources, and the runs where several share a source.
    """
    by_tokens = batches_differ(profiles)
    bars = named_bars(profiles, names, by_tokens)
    unit, size = time_unit(bar.seconds * bar.factor for bar in bars)
    found = {part.name for bar in bars for part in bar.parts}
    parts = tuple(sorted(found, key=palette.step_part_order))
    rows = [row for bar in bars for row in bar_rows(bar, parts, bar.factor / size, by_tokens)]
    title = "Time of a million tokens" if by_tokens else "Step time"
    unfit = any(profile.unfit_words for profile in profiles)
    return Figure(
        name="parts",
        title=f"{title} by part ({unit})",
        subtitle=" · ".join(subtitle_words(profiles, bars, by_tokens)),
        spec=step_time_spec(
            f"{title.lower()} ({unit})",
            parts,
            chart_data.seen_parts([palette.step_part_label(part) for part in parts], rows, "part"),
            tuple(bar.name for bar in bars),
        ),
        rows=rows,
        empty=f"No step time{': the plan does not fit' if unfit else ' is known'}.",
    )


def named_bars(
    profiles: Sequence[Profile], names: Sequence[str] = (), by_tokens: bool = False
) -> list[StepBar]:
    """The bars of profiles with a step time; in the parts of all where one was measured."""
    found = [profile_bars(profile) for profile in profiles]
    every = [bar for bars in found for bar in bars]
    words = max((len(bar.words) for bar in every), default=0)
    names = names or chart_data.bar_names(profiles, chart_data.MAX_NAME_LETTERS - words)
    for name, bars in zip(names, found):
        for bar in bars:
            bar.name = name + bar.words
            if any(one.traced for one in every):
                bar.parts = common_parts(bar.parts)
            if by_tokens:
                bar.factor = PER_TOKENS / (bar.profile.step_tokens or math.inf)
    return [bar for bar in every if bar.factor]


def profile_bars(profile: Profile) -> list[StepBar]:
    """The bars of one profile, in its own parts; none where no step time is known."""
    if profile.unfit_words:
        return []
    note = profile.notes.get(TIME_NOTE)
    if isinstance(note, dict):
        known = {str(k): float(v) for k, v in note.items() if isinstance(v, int | float) and v > 0}
        return [StepBar(profile, [Part(name, seconds) for name, seconds in known.items()])]
    if (traced := profile.notes.get(TRACED_NOTE)) is None:
        traced = TracedSteps()
        columns = ("step", "rank", "stage", "action", "start", "end")
        traced.add(dict(zip(columns, cells)) for cells in profile.rows("timeline", *columns))
    if traced.steps:
        shown = traced.shown_ranks()
        return [StepBar(profile, parts, words, traced.number) for words, parts in shown]
    seconds = profile.step_seconds
    return [StepBar(profile, [Part(WHOLE_STEP, seconds)])] if seconds else []


def bar_rows(
    bar: StepBar, parts: Sequence[str], scale: float, by_tokens: bool
) -> list[dict[str, Any]]:
    """Rows of one bar, in seconds times `scale`; the first carries the text beside it."""
    total = bar.seconds
    text = f"{count_text(bar.profile.step_tokens / total)} tokens/s" if by_tokens else ""
    text = (text or seconds_text(total)) + (" traced" if bar.traced else "")
    return [
        {
            "bar": bar.name,
            "part": palette.step_part_label(part.name),
            "order": parts.index(part.name),
            "value": part.seconds * scale,
            "total": total * scale,
            "text": None if i else text,
            "detail": part.detail,
        }
        for i, part in enumerate(bar.parts)
    ]


def subtitle_words(
    profiles: Sequence[Profile], bars: Sequence[StepBar], by_tokens: bool
) -> list[str]:
    """Sources; of a measured profile its step time, and of which steps the parts are."""
    words = [chart_data.source_words(profiles)]
    words += ["global batches differ: compare tokens/s"] if by_tokens else []
    measured = [profile for profile in profiles if profile.source == "measured"]
    if len(measured) == 1 and measured[0].step_seconds:
        words.append(f"step time {measured[0].step_time_words}")
    if traced := max((bar.traced for bar in bars), default=0):
        steps = counted(traced, "traced step")
        words.append(f"parts: {'median of ' if traced > 1 else ''}{steps}")
    return words


@lru_cache(maxsize=32)
def step_time_spec(
    title: str, names: tuple[str, ...], seen: tuple[str, ...], bars: tuple[str, ...]
) -> dict[str, Any]:
    """The declaration: a bar for each of `bars`, stacked by part; the legend lists `seen`."""
    titles, colours = (
        [palette.step_part_label(name) for name in names],
        [palette.STEP_PART_COLOURS.get(n, palette.OTHER_PART_COLOUR) for n in names],
    )
    base = alt.Chart(chart_data.ROWS).encode(
        y=alt.Y("bar:N", sort=list(bars), axis=chart_data.name_axis())
    )
    stack = base.mark_bar(stroke="white", strokeWidth=0.6).encode(
        x=alt.X(
            "value:Q",
            title=title,
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
            alt.Tooltip("value:Q", title=title, format=",.4~r"),
            alt.Tooltip("detail:N", title="of which"),
        ],
    )
    text = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    return vega_spec(
        alt.layer(stack, text.encode(x="total:Q", text="text:N"), chart_data.text_room()),
        height=max(50, 26 * len(bars)),
    )
