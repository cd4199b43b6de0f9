"""Stages with replicas of their own, rehearsed: memory and every collective as estimated, and no
order of calls that could hang.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.test_replicas import replicated
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.rehearse import rehearse

ZERO_1, SEQUENCE = {"strategy.data.zero": 1}, {"strategy.tensor.sequence": True}
PLANS = [
    replicated([2, 1], 3, tied=True),
    replicated([3, 1, 2], 5, tied=True, changes=ZERO_1),
    replicated([1, 2], 3, tied=True, changes=SEQUENCE, tensor=2),
    replicated([2, 1], 2, changes={"strategy.pipeline.schedule": "gpipe"}, context=2),
    replicated([1, 3], 4, changes={"strategy.pipeline.schedule": "zb-h1"}),
]
CALL = ["rank", "axis", "kind", "group_size", "dtype", "bytes", "action"]
on_every_plan = pytest.mark.parametrize("plan", PLANS, ids=["dp", "zero-1", "sp", "gpipe", "zb-h1"])


def calls(profile: Profile, step: int, ranks: set[int]) -> dict[Any, int]:
    frame = profile.collectives
    kept = frame[(frame.step == step) & frame["rank"].isin(ranks)]
    found: dict[Any, int] = kept.groupby(CALL)["count"].sum().to_dict()
    return found


@on_every_plan
def test_an_estimate_is_what_the_first_replica_of_each_stage_does(plan: Plan) -> None:
    estimated, rehearsed = estimate(plan), rehearse(plan)
    firsts = set(estimated.collectives["rank"])
    assert len(firsts) == plan.strategy.pipeline.size
    assert calls(estimated, 0, firsts) == calls(rehearsed, 1, firsts)
    for rank in firsts:
        peaks = (profile.peak_bytes_by_rank[rank] for profile in (estimated, rehearsed))
        assert next(peaks) == pytest.approx(next(peaks), rel=0.02)


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
