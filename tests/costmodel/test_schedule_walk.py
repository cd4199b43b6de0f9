"""What a rank holds, action by action of its schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from workbench.costmodel.inputs.executed_schedule import FILLED
from workbench.costmodel.memory.live_sets.schedule_walk import ScheduleWalk
from workbench.costmodel.operators.stage_pass import StagePass
from workbench.schedules import executable, generate, in_flight, receives_early, send_ends
from workbench.schedules.generators import SCHEDULES

CHUNKS = {name: max(schedule.min_chunks, 1) for name, schedule in SCHEDULES.items()}
BOUNDED_BY_RANKS = [name for name in SCHEDULES if name != "gpipe"]


def one_pass(deferred: dict[str, float]) -> StagePass:
    """A stage of which forward leaves one byte, and a split backward what is `deferred`."""
    left = {"activations": 1.0}
    calls: Any = Counter()
    backward, weights = {"embedding": deferred}, {"weights": {"temporary": 3.0}}
    return StagePass(left, {"forward": left}, backward, calls, calls, calls, deferred, weights)


def walked(
    schedule: str, ranks: int, microbatches: int, boundary: float, deferred: float
) -> list[dict[str, float]]:
    """Phase -> most bytes, of every rank."""
    table = generate(schedule, ranks, microbatches, CHUNKS[schedule])
    lowered = executable(table, early=receives_early(schedule, "gloo"))
    found = []
    for rank in range(ranks):
        whole, split = (
            dict.fromkeys(lowered.stages_of(rank), one_pass(left))
            for left in ({}, {"activations": deferred})
        )
        ends = send_ends(lowered, rank, "nccl", False)
        row, stages = lowered.rows[rank], lowered.stages
        walk = ScheduleWalk(row, ends, whole, split, stages, boundary).run()
        found.append({name: sum(live.values()) for name, live in walk.largest.items()})
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_microbatches_are_held_from_forward_to_weight_gradient(schedule: str, ranks: int) -> None:
    table = generate(schedule, ranks, 2 * ranks, CHUNKS[schedule])
    most = [phases["forward"] for phases in walked(schedule, ranks, 2 * ranks, 0.0, 1.0)]
    assert most == list(in_flight(table))


@pytest.mark.parametrize("schedule", BOUNDED_BY_RANKS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("deferred", [0.5, 2.0])
def test_so_many_microbatches_show_the_most_that_is_live(
    schedule: str, ranks: int, deferred: float
) -> None:
    few, many = (walked(schedule, ranks, n * ranks, 0.25, deferred) for n in (FILLED, 3 * FILLED))
    assert few == many
