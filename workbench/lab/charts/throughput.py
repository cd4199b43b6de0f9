"""Throughput of a run, rank by rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pandas as pd

from workbench.lab.charts import line_series
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile


def throughput(profile: Profile) -> Figure:
    """Throughput of the whole job (tokens/s) by step, as each rank timed it.

    Args:
        profile: A measured one. Beyond 16 ranks, a band and the three slowest ranks are drawn.
    """
    steps = profile.steps.dropna(subset=["seconds", "tokens"])
    steps = steps[steps.seconds > 0]
    values = steps[["rank", "step"]].assign(value=(steps.tokens / steps.seconds).astype(float))
    width = line_series.profile_width(profile, values.step)
    return throughput_figure(values, profile.world_size, profile.source, width)


def throughput_figure(values: pd.DataFrame, world_size: int, source: str, width: int) -> Figure:
    """The figure of a frame (rank, step, value in tokens/s), thinned to parts of `width` steps."""
    rows = line_series.series_rows(values, world_size, "smallest", width)
    return Figure(
        name="throughput",
        title="Throughput (tokens/s)",
        subtitle=f"{source} · whole job, as each rank timed the step",
        spec=throughput_spec(line_series.series_names(rows, world_size), width),
        rows=rows,
        empty="Shown after the first step.",
    )


@lru_cache(maxsize=8)
def throughput_spec(names: tuple[str, ...], width: int) -> dict[str, Any]:
    """The declaration."""
    return vega_spec(line_series.line_chart("tokens/s", names, width), height=150)
