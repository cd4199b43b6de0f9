"""Memory of one rank within a step, stacked by category, from action to action."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.runs.store.record_thinning import extremes
from workbench.units import byte_unit, bytes_text

MAX_POINTS = 400
"""Instants drawn; of a longer step the smallest and the largest sum of half as many spans."""
COMPUTE_ACTION = r"^\d+[FIWB](\d+)$"
"""Of a stage and a microbatch."""


def memory_over_time(
    profile: Profile, rank: int | None = None, microbatch: int | None = None
) -> Figure:
    """Memory after each allocation and release of a step, by category.

    Of one microbatch layers can be distinguished. Where they are recomputed, memory rises in the
    backward of each as it is recomputed, and peaks as it is differentiated.

    Args:
        profile: A rehearsal with `over_time=True`.
        rank: Whose memory; default: the rehearsed rank with the largest peak.
        microbatch: The one whose forward and backward are drawn; default: the whole step.

    Raises:
        ValueError: The step has no such microbatch.
    """
    frame = profile.levels
    names = [name for name in palette.MEMORY_COLOURS if name in frame]
    levels = frame.assign(total=frame[names].sum(axis=1))
    if rank is None and len(levels):
        rank = int(levels["rank"].tolist()[levels.total.argmax()])
    own = levels[levels["rank"] == rank]
    title = "allocations and releases of the step"
    if microbatch is not None:
        own, title = _of_microbatch(own, microbatch), f"highs and lows of microbatch {microbatch}"
    totals = own.total.tolist()
    span = 1 if len(own) <= MAX_POINTS else -(-2 * len(own) // MAX_POINTS)
    shown = [
        i + k for i in range(0, len(own), span) for k in sorted(extremes(totals[i : i + span]))
    ]
    title += f" (1 of {span // 2} drawn, extremes kept)" if span > 2 else ""
    unit, size = byte_unit(own.total)
    rows = [
        {"event": int(row["event"]), "action": row["action"], "category": name, "order": order}
        | {"called": palette.category_label(name)}
        | {"value": float(row[name]) / size, "total": float(row["total"]) / size}
        for row in own.iloc[shown].fillna(0).to_dict("records")
        for order, name in enumerate(names)
        if own[name].max() > 0
    ]
    categories = tuple(dict.fromkeys(row["category"] for row in rows))
    return Figure(
        name="memory_over_time",
        title=f"Memory over a step ({unit})",
        subtitle="" if not rows else _subtitle(profile, rank, own),
        spec=memory_over_time_spec(
            unit,
            categories,
            chart_data.seen_parts(list(map(palette.category_label, categories)), rows, "called"),
            title,
        ),
        rows=rows,
        wide=True,
        empty="No memory over time; rehearse with over_time=True.",
    )


def _of_microbatch(levels: pd.DataFrame, microbatch: int) -> pd.DataFrame:
    """Rows of its forward and backward, one after the other."""
    found = pd.to_numeric(levels.action.str.extract(COMPUTE_ACTION, expand=False))
    if not (found == microbatch).any():
        raise ValueError(f"microbatch is {microbatch}; legal: 0 to {found.max():.0f}")
    own = levels[found == microbatch]
    return own.assign(event=range(len(own)))


def _subtitle(profile: Profile, rank: int | None, own: Any) -> str:
    highest = own.loc[own.total.idxmax()]
    return (
        f"{chart_data.source_words([profile])} · rank {rank} · peak {bytes_text(highest.total)} in "
        f"{highest.action or 'the step'}"
    )


@lru_cache
def memory_over_time_spec(
    unit: str, categories: tuple[str, ...], seen: tuple[str, ...], title: str
) -> dict[str, Any]:
    """The declaration: areas of `value` by event, one a category; the legend lists `seen`."""
    colours = alt.Scale(
        domain=[palette.category_label(name) for name in categories],
        range=[palette.MEMORY_COLOURS[name] for name in categories],
    )
    area = (
        alt.Chart(chart_data.ROWS)
        .mark_area(interpolate="step-after", line=False)
        .encode(
            x=alt.X("event:Q", title=title),
            y=alt.Y("value:Q", title=f"memory ({unit})", stack="zero"),
            color=alt.Color(
                "called:N", scale=colours, title=None, legend=alt.Legend(values=list(seen))
            ),
            order=alt.Order("order:Q"),
            tooltip=["action:N", alt.Tooltip("called:N", title="category"), "value:Q", "total:Q"],
        )
    )
    return vega_spec(area, height=220)
