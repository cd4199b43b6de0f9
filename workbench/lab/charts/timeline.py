"""What each rank does in one step, as a Gantt chart: a simulated and a measured schedule look
alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from workbench.lab import palette, rank_selection
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.units import digits, time_unit

MAX_BARS = 8_000
"""Most bars drawn; of a longer step the beginning is shown, and the title says so."""
MAX_NUMBERED_BARS = 400
"""Up to this many bars carry their microbatch's number."""
MIN_SEEN_SHARE = 0.001
"""Share of the step from which an action can be seen: a pixel of a chart that has a whole line."""
LANE_HEIGHT = 18


def timeline(*profiles: Profile, step: int | None = None) -> Figure:
    """Actions of one step by rank, coloured by kind, lighter for earlier microbatches.

    Args:
        profiles: Of one plan; a simulated and a measured schedule look alike. One that does not fit
            has none.
        step: The step; default: the last one with a timeline.
    """
    fitting = tuple(profile for profile in profiles if not profile.unfit_words)
    frames = {
        lane: frame
        for profile in fitting
        for lane, frame in rank_lanes(profile, step, len(profiles) > 1).items()
    }
    unit, size = time_unit(frame.end.max() for frame in frames.values())
    found = sorted(
        (row for lane, frame in frames.items() for row in lane_rows(lane, frame, size)),
        key=lambda row: row["start"],
    )
    titles = {palette.action_style(str(name)) for frame in frames.values() for name in frame.action}
    order = tuple(
        entry
        for entry in dict.fromkeys([*palette.ACTION_STYLES.values(), palette.OTHER_ACTION_STYLE])
        if entry in titles
    )
    span, taken = max((row["end"] for row in found), default=0), dict[str, float]()
    for row in found:
        taken[row["action"]] = taken.get(row["action"], 0) + row["end"] - row["start"]
    numbered = len(found) <= MAX_NUMBERED_BARS
    numbers = numbered and any(row["microbatch"] is not None for row in found)
    cut = " · numbers: microbatches" if numbers else ""
    cut += (
        f" · the first {digits(found[MAX_BARS - 1]['end'])} {unit}" if len(found) > MAX_BARS else ""
    )
    return Figure(
        name="timeline",
        title=f"Timeline of a step, by rank ({unit})",
        subtitle=timeline_subtitle(profiles, frames) + cut,
        spec=timeline_spec(
            unit,
            tuple(frames),
            order,
            tuple(title for title, _ in order if taken[title] > MIN_SEEN_SHARE * span),
            numbered,
        ),
        rows=found[:MAX_BARS],
        wide=True,
        empty="Shown when a step has been timed." if fitting else "No step: the plan does not fit.",
    )


def rank_lanes(profile: Profile, step: int | None, name_source: bool) -> dict[str, pd.DataFrame]:
    """Label -> the rows of one rank and step; at most 16 ranks, spread over the pipeline."""
    frame = profile.timeline
    if not len(frame):
        return {}
    if frame.step.notna().any():
        frame = frame[frame.step == (frame.step.max() if step is None else step)]
    stages = rank_selection.stages_by_rank(profile)
    several = len(set(stages.values())) > 1
    tail = f" · {profile.source}" if name_source else ""
    return {
        rank_selection.rank_label(rank, stages if several else {}) + tail: frame[
            frame["rank"] == rank
        ]
        for rank in lane_ranks(frame)
    }


def lane_ranks(frame: pd.DataFrame) -> list[int]:
    """All ranks up to 16; else one a pipeline stage, and of those at most 16, evenly spread."""
    found = sorted(int(rank) for rank in frame["rank"].unique())
    if len(found) <= rank_selection.MAX_RANKS_SHOWN:
        return found
    found = sorted({int(rank) for rank in frame.groupby("stage", dropna=False)["rank"].min()})
    count = min(len(found), rank_selection.MAX_RANKS_SHOWN)
    return [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]


def lane_rows(lane: str, frame: pd.DataFrame, size: float) -> list[dict[str, Any]]:
    """Rows of one lane, in units of `size` seconds."""
    numbers = frame.microbatch.dropna()
    most = max(1, int(numbers.max())) if len(numbers) else 1
    found = []
    for name, batch, start, end, stage in zip(
        frame.action, frame.microbatch, frame.start, frame.end, frame.stage
    ):
        index = rank_selection.int_or_none(batch)
        found.append(
            {
                "lane": lane,
                "action": palette.action_style(str(name))[0],
                "name": str(name),
                "microbatch": index,
                "stage": rank_selection.int_or_none(stage),
                "start": start / size,
                "end": end / size,
                "middle": (start + end) / 2 / size,
                "shade": 0.7 + 0.3 * (index / most) if index is not None else 1.0,
            }
        )
    return found


def timeline_subtitle(profiles: tuple[Profile, ...], frames: dict[str, pd.DataFrame]) -> str:
    """The subtitle: sources, the steps shown, and the share of the step in which ranks are idle."""
    timed = any(profile.source == "measured" for profile in profiles)
    measured = [frame[frame.source == "measured"] for frame in frames.values() if timed]
    steps = sorted({int(s) for frame in measured for s in frame.step.dropna().unique()})
    text = chart_data.source_words(profiles) + (
        f" · step {', '.join(map(str, steps))}" if steps else ""
    )
    part = next(
        (
            p.notes["timeline_microbatches"]
            for p in profiles
            if p.notes.get("timeline_microbatches")
        ),
        None,
    )
    text += f" · the first {part} microbatches" if part else ""
    idle = [1 - compute_share(frame) for frame in frames.values()]
    return text + (
        f" · idle {digits(100 * sum(idle) / len(idle), 2)} % of the step" if idle else ""
    )


def compute_share(frame: pd.DataFrame) -> float:
    """Share of the step in which a rank computes (forward or backward, whole or in part)."""
    span = max(frame.end.tolist(), default=0.0)
    actions = zip(frame.action.tolist(), frame.start.tolist(), frame.end.tolist())
    return (
        sum(end - start for name, start, end in actions if name in ("F", "B", "I", "W")) / span
        if span
        else 0.0
    )


@lru_cache(maxsize=64)
def timeline_spec(
    unit: str,
    labels: tuple[str, ...],
    actions: tuple[tuple[str, str], ...],
    seen: tuple[str, ...],
    numbered: bool,
) -> dict[str, Any]:
    """The declaration: one line for each of `labels`, one colour for each of `actions`; the legend
    lists `seen`.
    """
    titles = [title for title, _ in actions]
    colour = alt.Scale(domain=titles, range=[colour for _, colour in actions])
    legend = chart_data.bottom_legend(seen, width=chart_data.FULL_WIDTH, beside=labels)
    y = alt.Y("lane:N", sort=list(labels), axis=chart_data.name_axis())
    base = alt.Chart(chart_data.ROWS).encode(y=y)
    bars = base.mark_bar(stroke="white", strokeWidth=0.5, strokeOpacity=0.6).encode(
        x=alt.X(
            "start:Q",
            title=f"{unit} from the start of the step",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(tickCount=10),
        ),
        x2="end:Q",
        color=alt.Color("action:N", scale=colour, legend=legend),
        fillOpacity=alt.FillOpacity("shade:Q", scale=None, legend=None),
        tooltip=[
            alt.Tooltip("lane:N", title="where"),
            "stage:Q",
            "action:N",
            alt.Tooltip("name:N", title="in the schedule"),
            "microbatch:Q",
            alt.Tooltip("start:Q", format=",.4~r"),
            alt.Tooltip("end:Q", format=",.4~r"),
        ],
    )
    if not numbered:
        return vega_spec(bars, height=max(50, LANE_HEIGHT * len(labels)))
    wide = "datum.microbatch != null && indexof(['F','B','I','W'], datum.name) >= 0"
    inside = (
        base.transform_filter(wide)
        .mark_text(fontSize=9)
        .encode(
            x="middle:Q",
            text="microbatch:Q",
            color=alt.condition("datum.name == 'F'", alt.value("white"), alt.value("#1a1a1a")),
        )
    )
    return vega_spec(alt.layer(bars, inside), height=max(50, LANE_HEIGHT * len(labels)))
