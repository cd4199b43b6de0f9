"""Spikes of long runs: whatever thins a series keeps every part's smallest and largest value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.lab import charts
from workbench.lab.charts import line_series
from workbench.lab.live.board import Board
from workbench.lab.live.figure import Figure
from workbench.lab.live.live_series import BoundedSeries
from workbench.lab.live.run_charts import RunCharts
from workbench.profile import Profile
from workbench.runs.store import telemetry_reader
from workbench.runs.store.telemetry_frames import MeasuredFrames

PLACES = 64
LENGTHS = (400, 1_200, 9_400, 100_000)
SLOW = pytest.mark.slow
FIELDS = ("value", "low", "high", "loss")
SPIKES = {"up": 90.0, "down": 1.0}


def spiked(steps: int, kind: str, shift: float = 0.0) -> tuple[np.ndarray, set[float]]:
    """A series that oscillates about 20, with one-step spikes at 64 places; the spikes."""
    values = 20 + np.arange(steps) % 3 / 8
    places = ((np.arange(PLACES) + shift) * steps / PLACES).astype(int)
    values[places] = SPIKES[kind] + np.arange(PLACES) / 128
    return values, set(values[places].tolist())


def step_records(values: np.ndarray, rank: int = 0) -> Iterator[dict[str, Any]]:
    """Telemetry whose loss, throughput and peak memory are all `values`."""
    for step, value in enumerate(values.tolist()):
        yield {"kind": "step", "t": 0.0, "rank": rank, "step": step, "loss": value} | {
            "seconds": 1024.0,
            "tokens": 1024 * value,
            "bytes": None,
            "max_memory_allocated": value,
        }


def telemetry(values: np.ndarray, world: int) -> Iterator[dict[str, Any]]:
    """The records of all ranks; the last has the spikes."""
    for rank in range(world):
        own = values if rank == world - 1 else np.full(len(values), 20.0)
        yield from step_records(own, rank)


def frames(records: Iterable[dict[str, Any]], world: int = 1) -> MeasuredFrames:
    found = MeasuredFrames("run", world)
    found.add(list(records))
    return found


def drawn(rows: list[dict[str, Any]]) -> set[float]:
    return {row[name] for row in rows for name in FIELDS if row.get(name) is not None}


def of_history(tmp_path: Path, records: Iterator[dict[str, Any]], world: int) -> Profile:
    """The profile of a run directory with these records, as attaching to it reads it."""
    (tmp_path / "telemetry").mkdir()
    lines: dict[int, list[bytes]] = {rank: [] for rank in range(world)}
    for record in records:
        lines[record.pop("rank")].append(orjson.dumps(record))
    for rank, own in lines.items():
        (tmp_path / "telemetry" / f"rank{rank:05d}.jsonl").write_bytes(b"\n".join([*own, b""]))
    reader = telemetry_reader.history(tmp_path)
    assert reader.every > 1
    return MeasuredFrames("run", world).read(reader).profile()


LINES: dict[str, Callable[..., Figure]] = {
    "loss": charts.loss,
    "throughput": charts.throughput,
    "memory_steps": charts.memory_steps,
}


@pytest.mark.parametrize("kind", SPIKES)
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("line", LINES)
def test_no_picture_of_a_long_run_loses_a_spike(line: str, steps: int, kind: str) -> None:
    for shift in (0.0, 0.99):
        values, spikes = spiked(steps, kind, shift)
        figure = LINES[line](frames(step_records(values)).profile())
        assert spikes <= drawn(figure.rows) and len(figure.rows) <= line_series.MAX_POINTS
        left_out = steps > line_series.MAX_POINTS
        assert ("steps drawn, extremes kept)" in str(figure.spec)) == left_out


@pytest.mark.parametrize("kind", SPIKES)
@pytest.mark.parametrize("steps", (400, 9_400))
@pytest.mark.parametrize("line", ("throughput", "memory_steps"))
def test_a_band_of_many_ranks_holds_one_ranks_spike(line: str, steps: int, kind: str) -> None:
    values, spikes = spiked(steps, kind)
    figure = LINES[line](frames(telemetry(values, 20), 20).profile())
    assert spikes <= drawn(figure.rows)
    band = [row for row in figure.rows if row["rank"] == line_series.MEDIAN]
    assert all(row["low"] <= row["value"] <= row["high"] for row in band)
    assert len(band) <= line_series.MAX_POINTS


def test_a_spike_of_all_ranks_shows_in_their_median() -> None:
    values, spikes = spiked(9_400, "down")
    records = [record for rank in range(20) for record in step_records(values, rank)]
    rows = charts.throughput(frames(records, 20).profile()).rows
    assert spikes <= {row["value"] for row in rows if row["rank"] == line_series.MEDIAN}


def points_of(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(row["step"], row.get("rank"), row.get("value", row.get("loss"))) for row in rows}


@pytest.mark.parametrize("kind", SPIKES)
@pytest.mark.parametrize(
    "steps", [*LENGTHS[:2], *(pytest.param(n, marks=SLOW) for n in LENGTHS[2:])]
)
def test_a_live_view_draws_what_a_picture_draws(steps: int, kind: str) -> None:
    values, spikes = spiked(steps, kind, 0.5)
    board, found = Board(), MeasuredFrames("run", 2)
    view = RunCharts(board, found.profile(), [], "cuda")
    records = [list(step_records(values, rank)) for rank in range(2)]
    size = steps // 40 + 1
    for i in range(0, steps, size):
        view.add_rows(found.add([x for own in records for x in own[i : i + size]]), [])
    for name, picture in LINES.items():
        live, still = board.rows(name), picture(found.profile())
        assert spikes <= drawn(live) and len(live) == len(still.rows)
        assert points_of(live) == points_of(still.rows)
        declared = next(figure for figure in board.figures if figure["name"] == name)
        assert declared["spec"] == still.spec


@pytest.mark.parametrize("kind", SPIKES)
@pytest.mark.parametrize("world", (1, 20))
def test_a_history_that_is_read_in_part_keeps_spikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, kind: str
) -> None:
    monkeypatch.setattr(telemetry_reader, "WHOLE_BYTES", 90_000 * world)
    values, spikes = spiked(9_400, kind)
    profile = of_history(tmp_path, telemetry(values, world), world)
    assert len(profile.steps) < 9_400 * world / 4
    for line in ("throughput", "memory_steps", *(["loss"] if world == 1 else [])):
        figure = LINES[line](profile)
        assert spikes <= drawn(figure.rows) and "extremes kept" in str(figure.spec)


@pytest.mark.parametrize("kind", SPIKES)
def test_sampled_memory_of_a_history_keeps_spikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(telemetry_reader, "WHOLE_BYTES", 150_000)
    values, spikes = spiked(9_400, kind)
    row = {"moment": "peak", "tier": "device", "category": "allocated", "stage": 0}
    records = (
        {"kind": "memory", "t": 0.0, "rank": 0, "step": 10 * i, "rows": [row | {"bytes": value}]}
        for i, value in enumerate(values.tolist())
    )
    assert spikes <= drawn(charts.memory_steps(of_history(tmp_path, records, 1)).rows)


@pytest.mark.parametrize("kind", SPIKES)
def test_memory_over_a_long_step_keeps_highs_and_lows(kind: str) -> None:
    values, spikes = spiked(9_400, kind)
    levels = pd.DataFrame({"rank": 0, "event": range(9_400), "action": "0F0"})
    levels = levels.assign(parameters=values)
    figure = charts.memory_over_time(Profile("run", "rehearsed", 1, levels=levels))
    assert spikes <= {row["total"] for row in figure.rows} and len(figure.rows) <= 400
    assert "1 of " in str(figure.spec)


def test_steps_without_a_finite_loss_stay_in_the_chart() -> None:
    values, _ = spiked(9_400, "up")
    records = list(step_records(values))
    for step in (0, 4_000, 9_399):
        records[step]["loss"] = None
    found, board = MeasuredFrames("run", 1), Board()
    view = RunCharts(board, found.profile(), [], "cuda")
    view.add_rows(found.add(records), [])
    for rows in (charts.loss(found.profile()).rows, board.rows("loss")):
        assert [row["step"] for row in rows if row["loss"] is None] == [0, 4_000, 9_399]
        assert not any(isinstance(v, float) and math.isnan(v) for r in rows for v in r.values())
    assert charts.loss(found.profile()).svg().count("step: 4000") == 1


VALUES = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, math.nan, math.inf])),
    min_size=1,
    max_size=120,
)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(1, 3), st.integers(1, 40), st.integers(0, 10**9))
def test_a_series_fed_in_parts_is_thinned_as_the_whole(
    values: list[float], ranks: int, batch: int, first: int
) -> None:
    points = [(rank, first + i, x) for i, x in enumerate(values) for rank in range(ranks)]
    whole = pd.DataFrame(points, columns=["rank", "step", "value"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_series, "MAX_POINTS", 10)
        thinned, width = line_series.thin_steps(whole), line_series.step_width(whole.step)
        assert set(points_of(shown_of(points, ranks, batch))) == points_of(
            line_series.series_rows(whole, ranks, "largest")
        )
        assert len(thinned) <= ranks * (3 * 5 + 1)
        again = line_series.thin_steps(thinned, 2 * width)
        assert again.equals(line_series.thin_steps(whole, 2 * width))
    kept = thinned.groupby(["rank", thinned.step // width]).value
    for key, own in whole.groupby(["rank", whole.step // width]).value:
        left = kept.get_group(key)
        known, drawn_too = own[np.isfinite(own)], left[np.isfinite(left)]
        assert known.agg(["min", "max"]).equals(drawn_too.agg(["min", "max"]))
        assert len(known) == len(own) or len(drawn_too) < len(left)


def shown_of(points: list[tuple[int, int, float]], ranks: int, batch: int) -> list[dict[str, Any]]:
    """Rows that a chart shows, sent the changes of a series that is fed in batches."""
    series, shown = BoundedSeries(ranks), list[dict[str, Any]]()
    for i in range(0, len(points), batch):
        change = series.add(points[i : i + batch])
        assert change is not None
        if any(row.get("open") for row in change.rows):
            shown = [row for row in shown if not row.get("open")]
        shown = change.rows if change.replace else shown + change.rows
    assert len(shown) == len(points_of(shown))
    return shown
