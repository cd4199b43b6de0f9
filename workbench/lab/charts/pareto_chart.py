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
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.units import GIB, digits, time_unit

GPU_MEMORY_SHOWN_FROM = 0.6
"""The GPU's memory is drawn where a plan's peak reaches this share of it; elsewhere the subtitle
states it.
"""
FRONT_LABEL = "Pareto front"
BEST_COLOUR = palette.SERIES_COLOURS[1]
NAMED_COLOURS = (palette.SERIES_COLOURS[5], palette.SERIES_COLOURS[2], palette.SERIES_COLOURS[6])
"""Colours of the plan ranked first, of the front's knee, of the least memory."""
CHART_HEIGHT = 260


def pareto_front(found: SearchResult) -> Figure:
    """Step time against peak memory (max rank) of what a search found, both axes logarithmic.

    The line is the Pareto front: no plan that was searched is faster with less memory. The legend
    names the strategy of the plan ranked first, of the front's knee and of the least memory.

    Args:
        found: What `wb.search` returns.
    """
    unit, size = time_unit(one.seconds for one in (*found.pareto, *found.top))
    best, named = f"best by {found.objective}", _named(found)
    rows = [_row(one, FRONT_LABEL, size) | {"front": True} for one in found.pareto]
    rows += [_row(one, best, size) for one in found.top]
    rows += [_row(one, words, size) for words, one in named.items()]
    capacity = found.top[0].plan.resolve().gpu.memory_gib if found.top else 0.0
    near = bool(rows) and max(row["peak"] for row in rows) >= GPU_MEMORY_SHOWN_FROM * capacity
    if near:
        rows[0] |= {"capacity": capacity, "capacity_text": f"GPU memory: {digits(capacity)} GiB"}
    subtitle = f"estimated · {found.feasible:,} of {found.candidates:,} plans meet every condition"
    return Figure(
        name="front",
        title=f"Peak memory (max rank, GiB) against step time ({unit})",
        subtitle=subtitle if near else f"{subtitle} · GPU memory: {digits(capacity)} GiB",
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
        "strategy": strategy_summary(one.plan),
        "gpus": one.plan.world_size,
        "rate": tokens / one.seconds,
    }


def _named(found: SearchResult) -> dict[str, Candidate]:
    """Legend entry -> the plan that it names, each plan once."""
    chosen = [("first", one) for one in found.top[:1]]
    chosen += [("knee", found.pareto[_knee(found.pareto)])] if len(found.pareto) > 2 else []
    chosen += [("least memory", one) for one in found.pareto[-1:]]
    once: dict[str, tuple[str, Candidate]] = {}
    for what, one in chosen:
        once.setdefault(strategy_summary(one.plan), (what, one))
    return {f"{what}: {words}": one for words, (what, one) in once.items()}


def _knee(points: Sequence[Candidate]) -> int:
    """The front's knee: the inner point furthest below the line from its first to its
    last, both in logs.
    """
    x, y = [math.log(one.seconds) for one in points], [math.log(one.peak_bytes) for one in points]
    slope = (y[-1] - y[0]) / ((x[-1] - x[0]) or 1.0)
    return max(range(1, len(points) - 1), key=lambda i: y[0] + slope * (x[i] - x[0]) - y[i])


@lru_cache(maxsize=8)
def pareto_spec(unit: str, best: str, named: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: the front as a stair with its points, the best plans and the `named` ones,
    the GPU's memory.
    """
    kinds, colours = (
        [FRONT_LABEL, best, *named],
        [palette.SERIES_COLOURS[0], BEST_COLOUR, *NAMED_COLOURS[: len(named)]],
    )
    x = alt.X("time:Q", title=f"step time ({unit})", scale=_log(), axis=chart_data.amount_axis())
    y = alt.Y(
        "peak:Q", title="peak memory, max rank (GiB)", scale=_log(), axis=chart_data.amount_axis()
    )
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
            alt.Tooltip("gpus:Q", title="GPUs"),
        ],
    )
    limit = (
        alt.Chart(chart_data.ROWS)
        .transform_filter("isValid(datum.capacity)")
        .encode(y="capacity:Q")
    )
    rule = limit.mark_rule(color=palette.LIMIT_COLOUR, strokeDash=[5, 3], strokeWidth=1.5)
    label = limit.mark_text(
        color=palette.LIMIT_COLOUR, align="right", baseline="bottom", dx=-4, dy=-3, fontSize=11
    )
    label = label.encode(x=alt.value("width"), text="capacity_text:N")
    return vega_spec(alt.layer(line, points, rule, label), height=CHART_HEIGHT)


def _log() -> alt.Scale:
    return alt.Scale(type="log", nice=False, padding=14)
