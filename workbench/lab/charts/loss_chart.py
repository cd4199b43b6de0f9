"""Loss of one or several runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from workbench.lab import palette
from workbench.lab.charts import chart_data, line_series
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile

TRAINING, VALIDATION = "training", "validation"


def loss(*profiles: Profile, evaluations: pd.DataFrame | None = None) -> Figure:
    """Training loss by step, a line a run; validation losses are points.

    Args:
        profiles: Measured ones.
        evaluations: Columns run, step and loss (nats per token).
    """
    names = chart_data.run_names(profiles)
    lines = [training_losses(profile) for profile in profiles]
    widths = [line_series.profile_width(p, line.step) for p, line in zip(profiles, lines)]
    width = max(widths, default=1)
    found = [
        loss_row(profile.run, step, value)
        for profile, line in zip(profiles, lines)
        for _, step, value in line_series.thin_steps(line, width).itertuples(index=False)
    ]
    if evaluations is not None:
        found += [
            loss_row(str(run), step, value, VALIDATION)
            for run, step, value in zip(evaluations.run, evaluations.step, evaluations.loss)
        ]
    return loss_figure(found, names, chart_data.source_words(profiles), width)


def training_losses(profile: Profile) -> pd.DataFrame:
    """Frame (rank, step, value) of the lowest rank: every rank logs the loss of the whole job."""
    steps = profile.steps
    own = steps[steps["rank"] == steps["rank"].min()]
    found: pd.DataFrame = own[["rank", "step"]].assign(value=own.loss.astype(float))
    return found


def loss_row(run: str, step: int, value: float | None, text: str = TRAINING) -> dict[str, Any]:
    """A row of this chart; a loss that is not finite is None."""
    loss = None if value is None else line_series.finite(value)
    return {"run": run, "step": int(step), "loss": loss, "text": text}


def loss_figure(
    rows: list[dict[str, Any]], names: list[str], source: str, width: int = 1
) -> Figure:
    """The figure of ready rows, thinned to parts of `width` steps."""
    return Figure(
        name="loss",
        title="Training loss (nats per token)",
        subtitle=f"{source} · line: training, points: {VALIDATION}",
        spec=loss_spec(tuple(names), width),
        rows=rows,
        empty="Shown after the first step.",
    )


@lru_cache(maxsize=32)
def loss_spec(names: tuple[str, ...], width: int) -> dict[str, Any]:
    """The declaration, one colour a run (and beyond eight another dash)."""
    colours, dashes = palette.line_styles(range(len(names)))
    legend = chart_data.bottom_legend(names, "stroke") if len(names) > 1 else None
    base = alt.Chart(chart_data.ROWS).encode(
        x=line_series.step_position(width),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", scale=alt.Scale(domain=list(names), range=colours), legend=legend),
        tooltip=[
            "run:N",
            alt.Tooltip("text:N", title="on"),
            "step:Q",
            alt.Tooltip("loss:Q", format=".4f"),
        ],
    )
    training = base.transform_filter(f"datum.text == '{TRAINING}'")
    line = training.mark_line(strokeWidth=1.8, strokeCap="round").encode(
        strokeDash=alt.StrokeDash(
            "run:N", scale=alt.Scale(domain=list(names), range=dashes), legend=legend
        )
    )
    points = base.transform_filter(f"datum.text == '{VALIDATION}'").mark_point(
        filled=False, size=45, strokeWidth=1.6
    )
    one = line_series.single_points(training, "run", "loss")
    missing = line_series.not_finite(training, "loss")
    return vega_spec(alt.layer(line, one, points, missing), height=150)
