"""A schedule that a user drew is estimated from its table, and refused where it is another
plan's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.schedules import generate, write_csv

EVEN = {
    "layers": 32,
    "hidden": 8192,
    "heads": 64,
    "ffn": 32768,
    "vocab": 256,
    "max_positions": 4096,
}


def plan_of(schedule: str, chunks: int = 1, **changes: Any) -> Plan:
    return Plan.of(
        "tiny",
        gpu="h100-sxm-80gb",
        gpus=4,
        strategy="dapple",
        set={
            "model": EVEN,
            "strategy.pipeline.schedule": schedule,
            "strategy.pipeline.chunks": chunks,
            "strategy.pipeline.partition": "uniform",
            "training.global_batch": 16,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)]
)
def test_a_drawn_table_costs_what_its_name_does(name: str, chunks: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_csv(generate(name, 4, 16, chunks), path)
    by_name, by_table = estimate(plan_of(name, chunks)), estimate(plan_of(str(path), chunks))
    assert by_table.peak_bytes_by_rank == pytest.approx(by_name.peak_bytes_by_rank, rel=1e-3)
    # Stages are equal but for the loss on the last: closed forms of split backwards take their
    # mean.
    assert by_table.step_seconds == pytest.approx(by_name.step_seconds, rel=0.01)


def test_a_pipe_is_not_read_as_a_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(PlanError, match=r"pipe.csv' cannot be used: it is no file"):
        plan_of(str(tmp_path / "pipe.csv")).resolve()


def test_an_order_that_waits_longer_costs_more(tmp_path: Path) -> None:
    slow, quick = tmp_path / "slow.csv", tmp_path / "quick.csv"
    write_csv(generate("gpipe", 4, 16), slow)
    write_csv(generate("1f1b", 4, 16), quick)
    peaks = [
        max(estimate(plan_of(str(path))).peak_bytes_by_rank.values()) for path in (slow, quick)
    ]
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "said"),
    [(2, 16, "has 2 ranks, the plan 4"), (4, 8, "has 8 microbatches, the plan 16")],
)
def test_a_table_of_another_plan_is_refused(
    ranks: int, microbatches: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.csv"
    write_csv(generate("1f1b", ranks, microbatches), path)
    with pytest.raises(PlanError, match=said):
        estimate(plan_of(str(path)))


@pytest.mark.parametrize("text", ["0F0,1B", "0F0", "", "\x00"])
def test_what_is_no_schedule_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    for name in (path, tmp_path / "absent.csv"):
        with pytest.raises(PlanError) as error:
            estimate(plan_of(str(name)))
        assert error.value.problems[0].field == "strategy.pipeline.schedule"
