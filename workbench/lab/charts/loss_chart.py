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
    found = [row for profile in profiles for row in training_rows(profile)]
    if evaluations is not None:
        found += [
            {"run": str(run), "step": int(step), "loss": float(value), "text": VALIDATION}
            for run, step, value in zip(evaluations.run, evaluations.step, evaluations.loss)
        ]
    return loss_figure(found, names, chart_data.source_words(profiles))


def training_rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a step, from the lowest rank: every rank logs the loss of the whole job."""
    steps = profile.steps
    steps = line_series.thin_steps(
        steps[steps["rank"] == steps["rank"].min()].dropna(subset=["loss"])
    )
    return [loss_row(profile.run, step, value) for step, value in zip(steps.step, steps.loss)]


def loss_row(run: str, step: int, value: float, text: str = TRAINING) -> dict[str, Any]:
    """A row of this chart."""
    return {"run": run, "step": int(step), "loss": float(value), "text": text}


def loss_figure(rows: list[dict[str, Any]], names: list[str], source: str) -> Figure:
    """The figure of ready rows."""
    return Figure(
        name="loss",
        title="Training loss (nats per token)",
        subtitle=f"{source} · line: training, points: {VALIDATION}",
        spec=loss_spec(tuple(names)),
        rows=rows,
        empty="Shown after the first step.",
    )


@lru_cache(maxsize=32)
def loss_spec(names: tuple[str, ...]) -> dict[str, Any]:
    """The declaration, one colour a run (and beyond eight another dash)."""
    colours, dashes = palette.line_styles(range(len(names)))
    legend = chart_data.bottom_legend(names, "stroke") if len(names) > 1 else None
    base = alt.Chart(chart_data.ROWS).encode(
        x=alt.X(
            "step:Q",
            title="step",
            scale=alt.Scale(zero=False, nice=False),
            axis=line_series.step_axis(),
        ),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", scale=alt.Scale(domain=list(names), range=colours), legend=legend),
        tooltip=[
            "run:N",
            alt.Tooltip("text:N", title="on"),
            "step:Q",
            alt.Tooltip("loss:Q", format=".4f"),
        ],
    )
    line = base.transform_filter(f"datum.text == '{TRAINING}'").mark_line(strokeWidth=1.8)
    line = line.encode(
        strokeDash=alt.StrokeDash(
            "run:N", scale=alt.Scale(domain=list(names), range=dashes), legend=None
        )
    )
    points = base.transform_filter(f"datum.text == '{VALIDATION}'").mark_point(
        filled=False, size=45, strokeWidth=1.6
    )
    one = line_series.single_points(base.transform_filter(f"datum.text == '{TRAINING}'"), "run")
    return vega_spec(alt.layer(line, one, points), height=150)
