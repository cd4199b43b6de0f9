"""Rehearsed pipelines with several stages a rank and split backwards against real ranks: memory and
every call.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.parallel.test_pipeline import scheduled
from tests.rehearsal.measured import STEPS, Rows, measure, total, traffic
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

SCHEDULES = [
    "1f1b",
    "interleaved",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager-1f1b", "zb-h1", "zb-v")),
    "dualpipe-v",
]
EACH = pytest.mark.parametrize("name", SCHEDULES)
BIG = {"training.sequence_length": 48, "strategy.data.bucket_mib": 1.0}


@lru_cache
def both(name: str) -> tuple[Profile, list[tuple[Rows, Rows, Rows]]]:
    """A rehearsal, and what every rank measured."""
    found = scheduled(name, changes=BIG, tied=True).resolve()
    return rehearse(found), measure(found)


def of_rank(profile: Profile, kind: str, rank: int) -> Rows:
    frame = getattr(profile, kind)
    rows: Rows = frame[frame["rank"] == profile.representative[rank]].to_dict("records")
    return rows


@pytest.mark.slow
@EACH
def test_peak_and_categories_are_those_of_real_ranks(name: str) -> None:
    profile, ranks = both(name)
    for rank, (allocated, counted, _) in enumerate(ranks):
        rehearsed = of_rank(profile, "memory", rank)
        for step in range(STEPS):
            assert total(rehearsed, step, "peak") == pytest.approx(
                total(allocated, step, "peak"), rel=0.02
            )
        for category in ("parameters", "gradients", "optimizer", "activations", "logits"):
            real, fake = (
                max(
                    (
                        r["bytes"]
                        for r in rows
                        if (r["moment"], r["category"]) == ("maximum", category)
                    ),
                    default=0,
                )
                for rows in (counted, rehearsed)
            )
            assert fake == pytest.approx(real, rel=0.02), (rank, category)


def test_every_stage_holds_tokens_and_targets() -> None:
    """The first reads no targets and the last no tokens, but each rank has the whole batch."""
    plan = scheduled("1f1b").resolve()
    t = plan.training
    batch = 2 * 8 * plan.num_microbatches * t.micro_batch * t.sequence_length
    for rank in range(plan.world_size):
        rows = of_rank(rehearse(plan), "memory", rank)
        overhead = {row["bytes"] for row in rows if row["category"] == "overhead"}
        assert overhead == {batch}, rank


@EACH
def test_traffic_is_that_of_real_ranks_call_by_call(name: str) -> None:
    profile, ranks = both(name)
    for rank, (_, _, calls) in enumerate(ranks):
        assert traffic(of_rank(profile, "collectives", rank)) == traffic(calls), rank
