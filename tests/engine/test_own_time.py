"""Own time of a rank: compute and sleep, not waits for other ranks, nor for a core."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.test_loop import trained
from workbench.engine.data.batch_feed import BatchFeed
from workbench.engine.measure import own_time
from workbench.engine.measure.own_time import OwnClock, PhaseTimes
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor

NAP = 0.06


def own_seconds(rank: int) -> float:
    """Own time of a step in which rank 1 sleeps before a collective."""
    clock, x = OwnClock(), torch.ones(4)
    with clock.watching():
        dist.all_reduce(x)
        began = clock.now()
        time.sleep(5 * NAP * rank)
        dist.all_reduce(x)
        return clock.now() - began


def test_a_sleep_is_a_ranks_own_and_the_wait_for_it_is_not() -> None:
    waiting, sleeping = run_ranks(2, own_seconds, seconds=60)
    assert waiting < sleeping and sleeping >= 5 * NAP
    assert "wait" in vars(dist.Work) and dist.Work.wait.__name__ == "wait"


def test_the_clock_stands_still_while_there_is_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "schedstat"
    counted.write_text("5 1000000000 3\n")
    monkeypatch.setattr(own_time, "_SCHEDSTAT", counted)
    clock = OwnClock()
    with clock.watching():
        phases = PhaseTimes(clock, clock.now())
        phases.begin("F")
        before, began = clock.now(), time.perf_counter()
        counted.write_text("5 9000000000 3\n")
        passed = time.perf_counter() - began
        assert clock.now() - before < passed - 7.9
        phases.begin("B")
    assert phases.seconds["forward"] == 0.0


@pytest.mark.parametrize(
    ("owner", "method", "phase"),
    [
        (MixedPrecisionOptimizer, "step", "optimizer"),
        (BatchFeed, "load", "data loading"),
        (ScheduleExecutor, "_forward", "forward"),
        (ScheduleExecutor, "_backward", "backward"),
    ],
)
def test_every_step_says_how_long_each_phase_took(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, phase: str
) -> None:
    run = getattr(owner, method)

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(NAP)
        return run(*args, **named)

    monkeypatch.setattr(owner, method, slow)
    code, records = trained(tmp_path / "run", text, training__steps=5)
    recorded = [record["own_seconds"] for record in records if record["kind"] == "step"]
    assert code == 0 and len(recorded) == 5
    for own in recorded:
        assert own[phase] >= NAP
        assert {"data loading", "forward", "backward", "optimizer", "other"} <= own.keys()
