"""Memory over the steps of a run, by the allocator's count."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pandas as pd

from workbench.lab.charts import line_series
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import ALLOCATED, Profile
from workbench.units import byte_unit

STEP_END, STEP_PEAK = "after_optimizer", "peak"
MOMENT_WORDS = {STEP_END: "at the end of each step", STEP_PEAK: "peak of sampled steps"}


def memory_steps(profile: Profile) -> Figure:
    """Allocated memory by step, a line a rank; beyond 16 ranks a band and the three largest.

    Args:
        profile: A measured one. CUDA has a count at the end of each step; else the peaks of the
            sampled steps are drawn.
    """
    frame = profile.memory
    counts = frame[(frame.category == ALLOCATED) & (frame.tier == "device")]
    ends, peaks = counts[counts.moment == STEP_END], counts[counts.moment == STEP_PEAK]
    moment, rows = (
        (STEP_END, ends) if ends.step.nunique() > peaks.step.nunique() else (STEP_PEAK, peaks)
    )
    totals = rows.groupby(["rank", "step"]).bytes.sum().rename("value").astype(float).reset_index()
    return memory_steps_figure(totals, profile.world_size, profile.source, moment)


def memory_steps_figure(totals: pd.DataFrame, world_size: int, source: str, moment: str) -> Figure:
    """The figure of a frame (rank, step, value in bytes), counted at `moment`."""
    unit, size = byte_unit(totals.value)
    rows = line_series.series_rows(
        totals.assign(value=totals.value / size), world_size, worst="largest"
    )
    return Figure(
        name="memory_steps",
        title=f"Allocated memory by step ({unit})",
        subtitle=f"{source} · the allocator's count, {MOMENT_WORDS[moment]}",
        spec=memory_steps_spec(unit, line_series.series_names(rows, world_size)),
        rows=rows,
        empty="Shown after the first step.",
    )


@lru_cache(maxsize=32)
def memory_steps_spec(unit: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: lines of `value` by step, or a band of all ranks with the outliers as
    lines.
    """
    return vega_spec(line_series.line_chart(unit, names, point=True), height=150)
