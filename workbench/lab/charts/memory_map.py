"""Peak memory of many ranks as a map, a node a line."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import altair as alt

from workbench.lab import palette, rank_selection
from workbench.lab.charts import chart_data
from workbench.lab.live.figure import Figure, vega_spec
from workbench.profile import Profile
from workbench.units import byte_unit, digits

MAX_MAP_RANKS = 4096
"""Most ranks drawn; a larger job is shown by its representative ranks."""


def has_memory_map(world_size: int) -> bool:
    """Whether a map helps: there are too many ranks for a bar each, and not too many for a square
    each.
    """
    return rank_selection.MAX_RANKS_SHOWN < world_size <= MAX_MAP_RANKS


def memory_map(profile: Profile) -> Figure:
    """Every rank as a square, coloured by its peak memory; red beyond the GPU's memory.

    Args:
        profile: Of more than 16 ranks; `memory` draws fewer.
    """
    peaks = profile.peak_bytes_by_rank
    per_row = 16 if len(peaks) <= 256 else 64
    unit, size = byte_unit(peaks.values())
    stages = rank_selection.stages_by_rank(profile)
    rows: list[dict[str, Any]] = [
        {
            "column": rank % per_row,
            "row": f"{rank - rank % per_row}",
            "rank": rank,
            "stage": stages.get(profile.representative.get(rank, rank), "0"),
            "value": value / size,
        }
        for rank, value in peaks.items()
    ]
    lines = -(-len(peaks) // per_row)
    return Figure(
        name="memory_map",
        title=f"Peak memory of all {len(peaks)} ranks ({unit})",
        subtitle=profile.source,
        spec=memory_map_spec(
            unit, lines, per_row, profile.capacity_bytes / size if profile.capacity_bytes else None
        ),
        rows=rows,
    )


@lru_cache(maxsize=32)
def memory_map_spec(unit: str, lines: int, per_row: int, capacity: float | None) -> dict[str, Any]:
    """The declaration; the colour runs from nothing to the GPU's capacity where that is known, and
    is red beyond it.
    """
    domain = [0, capacity] if capacity else alt.Undefined
    legend = alt.Legend(
        title=None,
        orient="bottom",
        direction="horizontal",
        gradientLength=180,
        gradientThickness=8,
        offset=4,
    )
    scale = alt.Scale(scheme="viridis", reverse=True, domain=domain, clamp=True)
    lines_axis = alt.Axis(labelOverlap=True)
    base = (
        alt.Chart(chart_data.ROWS)
        .mark_rect(stroke="white", strokeWidth=1, strokeOpacity=0.4)
        .encode(
            x=alt.X(
                "column:O",
                title=f"rank (mod {per_row})",
                axis=alt.Axis(labelAngle=0, labelOverlap=True),
            ),
            y=alt.Y(
                "row:O",
                title="first rank",
                sort=alt.EncodingSortField("rank", "min"),
                axis=lines_axis,
            ),
            tooltip=["rank:Q", "stage:N", alt.Tooltip("value:Q", title=unit, format=",.3~f")],
        )
    )
    layers = [base.encode(color=alt.Color("value:Q", scale=scale, legend=legend))]
    layers += [over_capacity(base, capacity, unit)] if capacity else []
    return vega_spec(alt.layer(*layers), height=max(40, lines * (14 if lines <= 16 else 8)))


def over_capacity(base: alt.Chart, capacity: float, unit: str) -> alt.Chart:
    """The ranks whose peak is more than `capacity`, in red, which the legend names."""
    label = f"more than the GPU's {digits(capacity)} {unit}"
    fill = alt.Fill(
        "beyond:N",
        scale=alt.Scale(domain=[label], range=[palette.LIMIT_COLOUR]),
        legend=alt.Legend(
            title=None, orient="bottom", symbolType="square", symbolSize=90, labelLimit=0, offset=4
        ),
    )
    over = base.transform_filter(f"datum.value > {capacity}")
    return over.transform_calculate(beyond=json.dumps(label)).encode(fill=fill)
