"""Roofline: operators of a rehearsal by arithmetic intensity and the FLOP/s that they reach."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.units import flops_text, seconds_text

OPERATORS_NOTE = "operators"
"""Key of `Profile.notes` under which a rehearsal gives its operators."""
PHASES = {"forward": "F", "recompute": "W", "backward": "B"}
"""Phase -> the action of a timeline whose colour it has."""
TERA = 1e12


def roofline(profile: Profile) -> Figure:
    """GEMMs and attention of the rank that computes longest, under the roof of the planned GPU.

    Args:
        profile: A rehearsal with `operators=True`. What does no FLOPs, and is bound by memory
            alone, has no place in the plane.
    """
    found = profile.notes.get(OPERATORS_NOTE)
    rows: list[dict[str, Any]] = []
    where = f" on {found['gpu']}" if found else ""
    if found:
        longest = max(found["ranks"], key=lambda one: one["compute_seconds"])["rank"]
        rows = [_point(row) for row in found["rows"] if row["rank"] == longest and row["flops"]]
    phases = {row["phase"] for row in rows}
    if found and rows:
        rows += _roof(found["reached"], [row["intensity"] for row in rows])
    return Figure(
        name="roofline",
        title="Roofline of a step's operators (TFLOP/s)",
        subtitle=f"shapes {chart_data.source_words([profile])} · times estimated{where}",
        spec=roofline_spec(tuple(name for name in PHASES if name in phases)),
        rows=rows,
        empty="No operators are counted; rehearse with operators=True.",
    )


def _point(row: dict[str, Any]) -> dict[str, Any]:
    shape = " x ".join(map(str, row["shape"]))
    return {
        "intensity": row["intensity"],
        "reached": row["flops"] / row["seconds"] / TERA,
        "phase": row["phase"],
        "seconds": row["seconds"],
        "operator": f"{row['operator']} {shape}, {row['dtype']}",
        "text": f"{seconds_text(row['seconds'])}, {row['share']:.1%} of the step",
        "flops": flops_text(row["flops"]),
        "bound": row["bound"],
    }


def _roof(reached: dict[str, float], intensities: list[float]) -> list[dict[str, Any]]:
    """Corners of the roof: bandwidth times intensity, up to what GEMMs reach."""
    ridge = reached["flops"] / reached["bytes"]
    low, high = min([*intensities, ridge / 4]), max([*intensities, ridge * 4])
    return [
        {"roof": x, "height": min(x * reached["bytes"], reached["flops"]) / TERA}
        for x in (low, ridge, high)
    ]


@lru_cache(maxsize=2)
def roofline_spec(phases: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: points by phase, of those that there are, their area the time, and the roof
    as a line.
    """
    logarithmic = alt.Scale(type="log", nice=False, padding=12)
    points = (
        alt.Chart(chart_data.ROWS)
        .transform_filter("isValid(datum.intensity)")
        .mark_point(filled=True, opacity=0.75, stroke="white", strokeWidth=0.6)
        .encode(
            x=alt.X("intensity:Q", title="FLOPs per byte", scale=logarithmic),
            y=alt.Y("reached:Q", title="TFLOP/s", scale=logarithmic),
            size=alt.Size("seconds:Q", legend=None, scale=alt.Scale(range=[30, 700])),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=list(phases), range=[_phase_colour(p) for p in phases]),
                legend=chart_data.bottom_legend(list(phases)),
            ),
            tooltip=[
                alt.Tooltip("operator:N", title="operator"),
                "phase:N",
                alt.Tooltip("flops:N", title="FLOPs"),
                alt.Tooltip("bound:N", title="bound by"),
                alt.Tooltip("text:N", title="time"),
            ],
        )
    )
    roof = (
        alt.Chart(chart_data.ROWS)
        .transform_filter("isValid(datum.roof)")
        .mark_line(color=palette.LIMIT_COLOUR, strokeWidth=2)
        .encode(x=alt.X("roof:Q", scale=logarithmic), y=alt.Y("height:Q", scale=logarithmic))
    )
    return vega_spec(alt.layer(roof, points), height=300)


def _phase_colour(phase: str) -> str:
    return palette.action_style(PHASES[phase])[1]
