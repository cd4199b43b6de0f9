"""Replicas of a stage that take whole microbatches in turn, as tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from workbench.schedules import (
    executable,
    generate,
    in_flight,
    in_flight_by_stage,
    round_robin,
    simulate,
    uniform,
    validate,
    warm_up,
)
from workbench.schedules.round_robin import takers


def test_rows_by_hand() -> None:
    """Two replicas before one: in flight on each are ceil(3 / 2), PipeDream's NOAM."""
    table = round_robin("1f1b", [2, 1], 4)
    assert str(table).splitlines() == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert [table.home(0, m) for m in range(4)] == [0, 1, 0, 1] and table.home(1, 3) == 2
    assert [table.stages_of(rank) for rank in range(3)] == [(0,), (0,), (1,)]


@pytest.mark.parametrize("name", takers())
def test_one_replica_a_stage_is_the_usual_table(name: str) -> None:
    for ranks, microbatches in ((1, 1), (3, 2), (4, 9)):
        usual = generate(name, ranks, microbatches)
        assert round_robin(name, [1] * ranks, microbatches) == replace(usual, replicas=(1,) * ranks)


@pytest.mark.parametrize("name", takers())
def test_drawn_tables_are_legal_before_and_after_lowering(name: str) -> None:
    draw = random.Random(name)
    for _ in range(40):
        replicas = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
        table = round_robin(name, replicas, draw.randint(max(replicas), 16))
        lowered = executable(table)
        assert not validate(table) and not validate(lowered)
        for apart in (False, True):
            simulate(lowered, uniform(len(replicas)), transport="nccl", pair_groups=apart)


def test_as_many_are_in_flight_as_replicas_are_ahead() -> None:
    """Those of later stages (NOAM), rounded up to as many on each replica."""
    assert warm_up("1f1b", 3, replicas=[3, 1, 2]) == (6, 3, 2)
    assert warm_up("1f1b", 3, replicas=[1, 3, 1]) == (7, 6, 1)
    assert in_flight(round_robin("1f1b", [3, 1, 2], 24)) == (2, 2, 2, 3, 1, 1)
    assert in_flight(round_robin("1f1b", [1, 3, 1], 24)) == (7, 2, 2, 2, 1)
    assert in_flight_by_stage(round_robin("1f1b", [3, 1, 2], 24)) == (2, 3, 1)
    assert in_flight(round_robin("eager-1f1b", [3, 1, 2], 24)) == (3, 3, 3, 5, 1, 1)
    bound = warm_up("eager-1f1b", 3, [1, 9, 9], [3, 1, 2])
    assert in_flight(round_robin("eager-1f1b", [3, 1, 2], 24, bound)) == (1, 1, 1, 3, 1, 1)
    assert in_flight(round_robin("gpipe", [3, 1], 4)) == (2, 1, 1, 4)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [3, 1, 2], [1, 3, 1], [5, 4, 3, 2, 1]])
def test_balanced_stages_lose_a_latency_and_no_more(replicas: list[int]) -> None:
    """Stages whose replicas have a microbatch done every F + B between them keep all of them busy:
    the step is what the busiest computes, and the first microbatch's way there and back.
    """
    seconds = {"F": [float(r) for r in replicas], "B": [2.0 * r for r in replicas]}
    timeline = simulate(round_robin("1f1b", replicas, 24), seconds)
    assert timeline.makespan <= 3 * 24 + 3 * sum(replicas)


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="'zb-v' has no round robin; legal: gpipe, 1f1b"):
        round_robin("zb-v", [2, 1], 4)
    with pytest.raises(ValueError, match="microbatches = 2; at least 3"):
        round_robin("1f1b", [1, 3], 2)


def test_an_action_on_another_replica_is_found() -> None:
    table = round_robin("gpipe", [2, 1], 2)
    swapped = replace(table, rows=(table.rows[1], table.rows[0], table.rows[2]))
    assert "rank 0: 0F1 belongs to rank 1, which holds stage 0" in validate(swapped)
