"""What a search found: step time against peak memory, the Pareto front and the plans that it puts
first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.planner.search import Candidate, SearchResult
from workbench.planner.search.search import GIB, short
from workbench.units import digits, time_unit

GPU_MEMORY_SHOWN_FROM = 0.6
"""A card's memory is drawn where the fullest plan reaches this share of it, and told in words
elsewhere.
"""
FRONT_LABEL = "front: none is faster with less memory"
BEST_COLOUR = palette.SERIES_COLOURS[1]
NAMED_COLOURS = (palette.SERIES_COLOURS[5], palette.SERIES_COLOURS[2], palette.SERIES_COLOURS[6])
"""Colours of the plan ranked first, of the front's bend, of the least memory."""
CHART_HEIGHT = 260


def pareto_front(found: SearchResult) -> Figure:
    """One point a plan: seconds of a step against the largest peak of any rank, both axes
    logarithmic.

    The line is the Pareto front: no plan that was searched lies left of and below it. The legend
    tells the strategy of the plan ranked first, of the front's bend and of its least memory.
    """
    unit, size = time_unit(one.seconds for one in (*found.pareto, *found.top))
    best, named = f"best by {found.objective}", _named(found)
    rows = [_row(one, FRONT_LABEL, size) | {"front": True} for one in found.pareto]
    rows += [_row(one, best, size) for one in found.top]
    rows += [_row(one, words, size) for words, one in named.items()]
    card = found.top[0].plan.resolve().gpu.memory_gib if found.top else 0.0
    near = bool(rows) and max(row["peak"] for row in rows) >= GPU_MEMORY_SHOWN_FROM * card
    if near:
        rows[0] |= {"card": card, "card_text": f"card: {digits(card)} GiB"}
    told = f"estimated · {found.feasible:,} of {found.candidates:,} plans meet every condition"
    return Figure(
        name="front",
        title=f"Memory of the fullest rank (GiB) against time of a step ({unit})",
        subtitle=told if near else f"{told} · a card has {digits(card)} GiB",
        spec=pareto_spec(unit, best, tuple(named)),
        rows=rows,
        empty=found.empty or "No plan was found.",
    )


def _row(one: Candidate, kind: str, size: float) -> dict[str, Any]:
    """Cells of one plan; time in units of `size` seconds."""
    tokens = one.plan.training.global_batch * one.plan.training.sequence_length
    return {
        "kind": kind,
        "time": one.seconds / size,
        "peak": one.peak_bytes / GIB,
        "strategy": short(one.plan),
        "cards": one.plan.world_size,
        "rate": tokens / one.seconds,
    }


def _named(found: SearchResult) -> dict[str, Candidate]:
    """Words of the legend -> the plan that they tell, each plan once."""
    chosen = [("first", one) for one in found.top[:1]]
    chosen += [("bend", found.pareto[_bend(found.pareto)])] if len(found.pareto) > 2 else []
    chosen += [("least memory", one) for one in found.pareto[-1:]]
    once: dict[str, tuple[str, Candidate]] = {}
    for what, one in chosen:
        once.setdefault(short(one.plan), (what, one))
    return {f"{what}: {words}": one for words, (what, one) in once.items()}


def _bend(points: Sequence[Candidate]) -> int:
    """Where the front bends most: the inner point furthest below the line from its first to its
    last, both in logs.
    """
    x, y = [math.log(one.seconds) for one in points], [math.log(one.peak_bytes) for one in points]
    slope = (y[-1] - y[0]) / ((x[-1] - x[0]) or 1.0)
    return max(range(1, len(points) - 1), key=lambda i: y[0] + slope * (x[i] - x[0]) - y[i])


@lru_cache(maxsize=8)
def pareto_spec(unit: str, best: str, named: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: the front as a stair with its points, the first plans and the `named` ones,
    a card's memory.
    """
    kinds, colours = (
        [FRONT_LABEL, best, *named],
        [palette.SERIES_COLOURS[0], BEST_COLOUR, *NAMED_COLOURS[: len(named)]],
    )
    x = alt.X("time:Q", title=f"{unit} a step", scale=_log(), axis=chart_data.amount_axis())
    y = alt.Y("peak:Q", title="GiB", scale=_log(), axis=chart_data.amount_axis())
    base = alt.Chart(chart_data.ROWS).encode(x=x, y=y)
    line = base.transform_filter("datum.front").mark_line(
        interpolate="step-after", strokeWidth=1.2, color=palette.SERIES_COLOURS[0]
    )
    points = base.transform_filter("isValid(datum.time)").mark_point(filled=True, opacity=1)
    points = points.encode(
        color=alt.Color(
            "kind:N",
            scale=alt.Scale(domain=kinds, range=colours),
            legend=chart_data.bottom_legend(kinds, "circle"),
        ),
        size=alt.Size(
            "kind:N",
            scale=alt.Scale(domain=kinds, range=[24, 50, *[110] * len(named)]),
            legend=None,
        ),
        tooltip=[
            "strategy:N",
            alt.Tooltip("time:Q", title=unit, format=",.4~r"),
            alt.Tooltip("peak:Q", title="GiB", format=",.3~r"),
            alt.Tooltip("rate:Q", title="tokens/s", format=",.0f"),
            "cards:Q",
        ],
    )
    limit = alt.Chart(chart_data.ROWS).transform_filter("isValid(datum.card)").encode(y="card:Q")
    rule = limit.mark_rule(color=palette.LIMIT_COLOUR, strokeDash=[5, 3], strokeWidth=1.5)
    said = limit.mark_text(
        color=palette.LIMIT_COLOUR, align="right", baseline="bottom", dx=-4, dy=-3, fontSize=11
    )
    said = said.encode(x=alt.value("width"), text="card_text:N")
    return vega_spec(alt.layer(line, points, rule, said), height=CHART_HEIGHT)


def _log() -> alt.Scale:
    return alt.Scale(type="log", nice=False, padding=14)
