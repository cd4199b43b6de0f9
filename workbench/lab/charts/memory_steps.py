"""Memory over the steps of a run, by the allocator's count, beside what was predicted of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from workbench.lab import palette
from workbench.lab.charts import chart_data, line_series
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import ALLOCATED, Profile
from workbench.units import byte_unit, bytes_text
from workbench.vocabulary import NOT_ALLOCATED

STEP_END, STEP_PEAK, EACH_PEAK = "after_optimizer", "peak", "max_memory_allocated"
MOMENT_WORDS = {
    STEP_END: "at the end of each step",
    STEP_PEAK: "peak of sampled steps",
    EACH_PEAK: "peak of each step",
}


class Prediction(NamedTuple):
    """Allocated memory by another instrument, max over ranks."""

    source: str
    size: float
    """Bytes."""


def memory_steps(profile: Profile, beside: Sequence[Profile] = ()) -> Figure:
    """Allocated memory by step, a line a rank; beyond 16 ranks a band and the three largest.

    Args:
        profile: A measured one. CUDA counts the peak of each step; else the peaks of the sampled
            steps are drawn.
        beside: Profiles of the same plan whose allocated memory is drawn as a limit each.
    """
    totals, moment = allocated_by_step(profile)
    width = line_series.profile_width(profile, totals.step)
    return memory_steps_figure(
        totals, profile.world_size, profile.source, moment, width, predictions(beside, moment)
    )


def allocated_by_step(profile: Profile) -> tuple[pd.DataFrame, str]:
    """A frame (rank, step, value in bytes), and the moment at which it was counted."""
    steps = profile.steps
    if EACH_PEAK in steps and steps[EACH_PEAK].notna().any():
        counted = steps[steps[EACH_PEAK].notna()]
        found = counted[["rank", "step", EACH_PEAK]].rename(columns={EACH_PEAK: "value"})
        return found.astype({"value": float}), EACH_PEAK
    frame = profile.memory
    counts = frame[(frame.category == ALLOCATED) & (frame.tier == "device")]
    ends, peaks = counts[counts.moment == STEP_END], counts[counts.moment == STEP_PEAK]
    moment, rows = (
        (STEP_END, ends) if ends.step.nunique() > peaks.step.nunique() else (STEP_PEAK, peaks)
    )
    totals = rows.groupby(["rank", "step"]).bytes.sum().rename("value").astype(float).reset_index()
    return totals, moment


def predictions(profiles: Sequence[Profile], moment: str) -> list[Prediction]:
    """Allocated memory at `moment` that estimates and rehearsals predict."""
    at = STEP_END if moment == STEP_END else STEP_PEAK
    found = []
    for profile in profiles:
        sums: dict[int, float] = {}
        for category, rank, size in profile.rows(
            "memory", "category", "rank", "bytes", moment=at, tier="device"
        ):
            if category not in (ALLOCATED, *NOT_ALLOCATED):
                sums[rank] = sums.get(rank, 0) + size
        if sums and profile.source != "measured":
            found.append(Prediction(profile.source, max(sums.values())))
    return found


def memory_steps_figure(
    totals: pd.DataFrame,
    world_size: int,
    source: str,
    moment: str,
    width: int,
    beside: Sequence[Prediction] = (),
) -> Figure:
    """The figure of a frame (rank, step, value in bytes), counted at `moment` and thinned to parts
    of `width` steps.
    """
    unit, size = byte_unit([*totals.value, *(p.size for p in beside)] if len(totals) else [])
    rows = line_series.series_rows(
        totals.assign(value=totals.value / size), world_size, "largest", width
    )
    names = line_series.series_names(rows, world_size)
    if rows:
        rows += [{"predicted": p.size / size, "source": p.source} for p in beside]
    words = [f"{p.source}: {bytes_text(p.size)}, max over ranks" for p in beside]
    return Figure(
        name="memory_steps",
        title=f"Allocated memory by step ({unit})",
        subtitle=" · ".join([source, f"the allocator's count, {MOMENT_WORDS[moment]}", *words]),
        spec=memory_steps_spec(unit, names, width),
        rows=rows,
        empty="Shown after the first step.",
    )


@lru_cache(maxsize=32)
def memory_steps_spec(unit: str, names: tuple[str, ...], width: int) -> dict[str, Any]:
    """The declaration: lines of `value` by step, or a band of all ranks with the outliers as
    lines; a dashed rule at each prediction.
    """
    predicted = alt.Chart(chart_data.ROWS).transform_filter("isValid(datum.predicted)")
    predicted = predicted.encode(y="predicted:Q", tooltip=["source:N"])
    rule = predicted.mark_rule(color=palette.NEUTRAL_COLOUR, strokeDash=[6, 4])
    text = predicted.mark_text(color=palette.NEUTRAL_COLOUR, align="left", baseline="bottom", dx=4)
    label = text.encode(x=alt.value(0), text="source:N")
    return vega_spec(line_series.line_chart(unit, names, width, True) + rule + label, height=150)
