"""Stages with replicas of their own, rehearsed: memory and every collective as estimated, and no
order of calls that could hang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel.test_replicas import replicated
from tests.parallel.test_round_robin import in_turn
from workbench.plan.rank_placement import first_ranks_of_replicas
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.rehearse import RankSteps, rank_steps, rehearse

EAGER = {"strategy.pipeline.schedule": "eager-1f1b", "strategy.pipeline.in_flight": [9, 2, 1]}
DEFERRED = {"strategy.pipeline.schedule": "zb-h2", "strategy.recompute": "full"}
"""Recomputed layers need more for their weight gradients than they saved before backward."""
ZERO_1, SEQUENCE = {"strategy.data.zero": 1}, {"strategy.tensor.sequence": True}
PLANS = [
    replicated([2, 1], 3, tied=True),
    replicated([3, 1, 2], 5, tied=True, changes=ZERO_1),
    replicated([1, 2], 3, tied=True, changes=SEQUENCE, tensor=2),
    replicated([2, 1], 2, changes={"strategy.pipeline.schedule": "gpipe"}, context=2),
    replicated([1, 3], 4, changes={"strategy.pipeline.schedule": "zb-h1"}),
    replicated([1, 2, 1], 3, tied=True, microbatches=6, changes=EAGER),
    in_turn([2, 1], 5, tied=True),
    in_turn([3, 1, 2], 7, tied=True, changes=ZERO_1),
    in_turn([1, 2], 3, tied=True, changes=SEQUENCE, tensor=2),
    in_turn([2, 1], 11, changes={"strategy.pipeline.schedule": "gpipe"}, context=2),
    in_turn([1, 2, 1], 10, tied=True, changes=DEFERRED),
    in_turn([3, 1, 2], 14, changes=EAGER),
    in_turn([2], 6, changes={"strategy.pipeline.schedule": "gpipe"}),
]
CALL = ["axis", "kind", "group_size", "dtype", "bytes", "action"]
IDS = ["dp", "zero-1", "sp", "gpipe", "zb-h1", "eager"]
TURNS = [
    "turns",
    "turns-zero-1",
    "turns-sp",
    "turns-gpipe",
    "turns-zb-h2",
    "turns-eager",
    "turns-one",
]
QUICK = {"dp", "sp", "turns"}
on_every_plan = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for plan, name in zip(PLANS, IDS + TURNS)
    ],
)
STEPS: dict[tuple[str, int, bool], RankSteps] = {}


@pytest.fixture(autouse=True)
def each_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ask for the same ranks of the same plans: each is rehearsed once."""

    def once(
        plan: ResolvedPlan, rank: int, operators: bool, over_time: bool, on_run: Callable[[], None]
    ) -> RankSteps:
        key = plan.to_yaml(), rank, operators
        if key not in STEPS:
            STEPS[key] = rank_steps(plan, rank, operators, over_time)
        return STEPS[key]

    monkeypatch.setattr(sys.modules["workbench.rehearsal.rehearse"], "rank_steps", once)


def calls(profile: Profile, step: int, rank: int) -> dict[Any, int]:
    frame = profile.collectives
    kept = frame[(frame.step == step) & (frame["rank"] == rank)]
    found: dict[Any, int] = kept.groupby(CALL)["count"].sum().to_dict()
    return found


@on_every_plan
def test_an_estimate_is_what_every_rank_does(plan: Plan) -> None:
    estimated = estimate(plan)
    everyone = range(estimated.world_size)
    rehearsed = rehearse(plan, ranks=everyone)
    for rank in everyone:
        stand_in = estimated.representative[rank]
        assert calls(estimated, 0, stand_in) == calls(rehearsed, 1, rank), rank
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)


@on_every_plan
def test_both_instruments_show_the_same_ranks(plan: Plan) -> None:
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.representative == rehearsed.representative
    shown = set(estimated.representative.values())
    for frame in (estimated.memory, estimated.collectives, rehearsed.memory):
        assert set(frame["rank"]) == shown
    in_time = shown
    if plan.strategy.pipeline.is_round_robin:
        in_time = set(first_ranks_of_replicas(plan.resolve()))
    assert set(estimated.timeline["rank"]) == in_time
    assert stages(estimated) == stages(rehearsed)


def stages(profile: Profile) -> dict[int, int]:
    return {int(rank): int(stage) for rank, stage in profile.rows("memory", "rank", "stage")}


@on_every_plan
def test_no_rank_can_hang(plan: Plan) -> None:
    assert check_order(plan).problems == ()


def test_every_replica_is_rehearsed_that_shares_a_microbatch_otherwise() -> None:
    """Five sequences over three replicas are 2, 2 and 1, and over two 3 and 2: the first two of
    three send to one and to two ranks.
    """
    profile = rehearse(replicated([3, 2], 5))
    assert profile.representative == {rank: rank for rank in range(5)}
    same = rehearse(replicated([2, 1], 4)).representative
    assert same == {0: 0, 1: 0, 2: 2}


@pytest.mark.parametrize(("zero", "first_alike"), [(0, [0, 0, 2]), (1, [0, 1, 2])])
def test_replicas_that_exchange_other_parts_of_a_tied_weight_differ(
    zero: int, first_alike: list[int]
) -> None:
    """Although they have equal parts of a microbatch: the third of three sends its gradient to none
    of two; the second of three shards lies in both of two, and the third is shorter by its padding.
    """
    plan = replicated([3, 1, 2], 6, tied=True, changes={"strategy.data.zero": zero})
    everyone = range(6)
    estimated, rehearsed = estimate(plan), rehearse(plan, ranks=everyone)
    assert [estimated.representative[rank] for rank in range(3)] == first_alike
    for rank in everyone:
        assert calls(estimated, 0, estimated.representative[rank]) == calls(rehearsed, 1, rank)


def test_the_estimated_compute_of_an_operator_report_is_of_the_rank() -> None:
    report = rehearse(replicated([2, 1], 3), operators=True).notes["operators"]
    seconds = [row["estimated_compute_seconds"] for row in report["ranks"]]
    assert len(seconds) == 3 and seconds[1] < seconds[0]
