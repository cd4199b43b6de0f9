"""Estimated and measured memory of a GPU: each number beside the same quantity."""

from __future__ import annotations

from typing import Any

import pytest

from workbench import estimate
from workbench.lab import charts
from workbench.lab.comparison.compare import compare
from workbench.plan.schema import Plan
from workbench.profile import Profile, frame
from workbench.runs.store.telemetry_frames import MeasuredFrames
from workbench.vocabulary import FRAGMENTATION, MEMORY_COUNTERS, OUTSIDE

MIB = 2**20


def step(number: int, **counters: int) -> dict[str, Any]:
    """A telemetry record of rank 0."""
    known = {"loss": 1.0, "seconds": 0.1, "tokens": 8, "bytes": 80 * MIB}
    none = dict.fromkeys(MEMORY_COUNTERS)
    return {"kind": "step", "rank": 0, "step": number, **known, **none, **counters}


def memory(number: int, **sizes: int) -> dict[str, Any]:
    rows = [
        {"stage": 0, "moment": moment, "tier": "device", "category": name, "bytes": size * MIB}
        for moment in ("peak", "maximum")
        for name, size in sizes.items()
        if moment == "peak" or name != "allocated"
    ]
    return {"kind": "memory", "rank": 0, "step": number, "rows": rows}


@pytest.fixture
def measured() -> Profile:
    frames = MeasuredFrames("run", 1, 1000 * MIB)
    frames.add(
        [
            step(
                0,
                max_memory_allocated=100 * MIB,
                max_memory_reserved=120 * MIB,
                num_alloc_retries=0,
                process_memory_used=420 * MIB,
            ),
            memory(0, allocated=100, parameters=60, activations=30, fragmentation=20,
                   outside_allocator=300),
            step(1, max_memory_allocated=110 * MIB, max_memory_reserved=140 * MIB,
                 num_alloc_retries=3),
        ]
    )  # fmt: skip
    return frames.profile()


@pytest.fixture(scope="module")
def estimated() -> Profile:
    return estimate(Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp"))


def test_the_peaks_of_ordinary_steps_count(measured: Profile) -> None:
    assert measured.peak_allocated_by_rank == {0: 110 * MIB}
    assert measured.peak_reserved_by_rank == {0: 140 * MIB}
    assert measured.peak_bytes_by_rank == {0: 440 * MIB}
    assert measured.steps.num_alloc_retries.tolist() == [0, 3]
    assert measured.by_category[OUTSIDE] == 300 * MIB


def test_an_estimate_says_what_is_allocated_reserved_and_outside(estimated: Profile) -> None:
    sizes = dict(estimated.rows("memory", "category", "bytes", moment="peak", tier="device"))
    allocated, reserved = estimated.peak_allocated_by_rank[0], estimated.peak_reserved_by_rank[0]
    assert reserved - allocated == pytest.approx(sizes[FRAGMENTATION], abs=1)
    assert estimated.peak_bytes_by_rank[0] - reserved == pytest.approx(sizes[OUTSIDE], abs=1)
    assert sizes[OUTSIDE] == (600 + 2 * 400) * MIB  # context, two communicators


def test_a_bar_holds_the_same_parts_whoever_says_so(measured: Profile, estimated: Profile) -> None:
    rows = charts.memory(estimated, measured).rows
    for source in ("estimated", "measured"):
        assert {FRAGMENTATION, OUTSIDE} <= {r["category"] for r in rows if r["source"] == source}
    (bar,) = {r["total"] for r in rows if r["source"] == "measured"}
    (other,) = (r for r in rows if r["source"] == "measured" and r["category"] == "unattributed")
    assert other["value"] / bar == pytest.approx(10 / 420)


def test_allocated_memory_by_step_stands_beside_the_estimate_of_allocated(
    measured: Profile, estimated: Profile
) -> None:
    figure = charts.memory_steps(measured, [estimated])
    unit = 2**30 if "GiB" in figure.title else MIB
    lines = [row["value"] * unit for row in figure.rows if "value" in row]
    assert lines == pytest.approx([100 * MIB, 110 * MIB])
    (rule,) = (row for row in figure.rows if "predicted" in row)
    allocated = max(estimated.peak_allocated_by_rank.values())
    assert rule["source"] == "estimated"
    assert rule["predicted"] * unit == pytest.approx(allocated, rel=1e-6)
    assert "measured" in figure.subtitle and "peak of each step" in figure.subtitle


def test_a_comparison_errs_about_what_both_count(measured: Profile, estimated: Profile) -> None:
    row = compare([estimated, measured]).frame.iloc[0]
    assert row.measured_allocated_bytes == 110 * MIB and row.measured_bytes == 440 * MIB
    assert row.estimated_error == pytest.approx(
        row.estimated_allocated_bytes / row.measured_allocated_bytes - 1
    )


def test_frames_of_an_older_version_lack_the_counters(measured: Profile) -> None:
    old = Profile("old", "measured", 1, measured.memory,
                  steps=frame("steps", []).drop(columns=list(MEMORY_COUNTERS)))  # fmt: skip
    assert old.peak_allocated_by_rank == {0: 100 * MIB}
    assert charts.memory_steps(old).rows
