"""What the ranks send to each other, by axis."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from workbench.lab import palette
from workbench.lab.charts import common
from workbench.lab.figure import Figure, declare
from workbench.lab.units import byte_unit, bytes_text
from workbench.profile import Profile

AXES = ("tensor", "sequence", "context", "expert", "data", "pipeline")


def collectives(*profiles: Profile) -> Figure:
    """Bytes that the busiest rank hands to collectives in one step, by axis and kind, one bar a source."""
    frames = list(zip(common.names_of(profiles), map(busiest, profiles)))
    totals = [frame.groupby("axis").payload.sum().max() for _, frame in frames if len(frame)]
    unit, size = byte_unit(totals)
    rows = [row for name, frame in frames for row in rows_of(name, frame, size, name if len(frames) > 1 else "")]
    kinds = tuple(name for name in palette.KINDS if any(row["kind"] == name for row in rows))
    found = [row["axis"] for row in rows]
    axes = tuple(dict.fromkeys([*(axis for axis in AXES if axis in found), *found]))
    bars = tuple(dict.fromkeys(row["bar"] for row in rows))
    return Figure(
        name="collectives",
        title=f"Communication in a step, by axis ({unit})",
        subtitle=f"{common.sources(profiles)} · tensors handed over by the busiest rank",
        spec=spec(unit, kinds, axes, bars),
        rows=rows,
        empty="No communication: every axis has one rank, or no step was sampled yet.",
    )


def busiest(profile: Profile) -> pd.DataFrame:
    """Rows of the rank and step with the largest payload (bytes x count)."""
    frame = profile.collectives
    frame = frame.assign(payload=frame.bytes.astype(float) * frame["count"].astype(float), step=frame.step.fillna(-1))
    if not len(frame):
        return frame
    totals = frame.groupby(["rank", "step"], as_index=False).payload.sum()
    most = totals.loc[totals.payload.idxmax()]
    return frame[(frame["rank"] == most["rank"]) & (frame.step == most["step"])]


def rows_of(bar: str, frame: pd.DataFrame, size: int, told: str) -> list[dict[str, Any]]:
    """One row an axis and kind, in units of `size` bytes; the first of an axis carries the words, `told` among them."""
    named = frame.assign(kind=[palette.kind(str(name)) for name in frame.kind]) if len(frame) else frame
    groups = named.groupby(["axis", "kind"], as_index=False).agg(
        payload=("payload", "sum"), calls=("count", "sum"), ranks=("group_size", "max")
    )
    rows: list[dict[str, Any]] = []
    for axis, kind, payload, calls, ranks in groups.itertuples(index=False):
        first = not any(row["axis"] == axis for row in rows)
        total = groups[groups.axis == axis].payload.sum() / size
        text = " ".join([bytes_text(total * size), told]).strip() if first else None
        cells = {"axis": axis, "kind": kind, "bar": bar, "value": payload / size, "total": total, "text": text}
        rows.append(cells | {"calls": int(calls), "ranks": int(ranks), "order": list(palette.KINDS).index(kind)})
    return rows


@lru_cache(maxsize=64)
def spec(unit: str, kinds: tuple[str, ...], axes: tuple[str, ...], bars: tuple[str, ...]) -> dict[str, Any]:
    """The declaration: a bar for each of `bars` in each of `axes`, stacked by kind of collective."""
    colour = alt.Scale(domain=list(kinds), range=[palette.KINDS[name] for name in kinds])
    base = alt.Chart(common.ROWS).encode(
        y=alt.Y("axis:N", sort=list(axes), axis=common.names()),
        yOffset=alt.YOffset("bar:N", sort=list(bars), scale=alt.Scale(paddingInner=0.12)),
    )
    stack = base.mark_bar(stroke="white", strokeWidth=0.5).encode(
        x=alt.X("value:Q", title=f"{unit} a step", stack="zero", scale=alt.Scale(nice=False), axis=common.amounts()),
        color=alt.Color("kind:N", scale=colour, legend=common.legend(4)),
        order="order:Q",
        tooltip=[
            "axis:N", "kind:N", alt.Tooltip("bar:N", title="source"),
            alt.Tooltip("value:Q", title=unit, format=",.3~f"),
            alt.Tooltip("calls:Q", title="calls a step"), alt.Tooltip("ranks:Q", title="ranks in the group"),
        ],
    )  # fmt: skip
    text = base.transform_filter("datum.text != null").mark_text(align="left", dx=5, fontSize=11)
    room = alt.Chart(common.ROWS).transform_calculate(room="datum.total * 1.5").mark_point(opacity=0).encode(x="room:Q")
    layers = alt.layer(stack, text.encode(x="total:Q", text="text:N"), room)
    return declare(layers, height=max(50, len(axes) * (len(bars) * 16 + 10)))
