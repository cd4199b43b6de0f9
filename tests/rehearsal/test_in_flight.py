"""What collectives hold while they are under way: the same on real ranks as in a rehearsal, however
late they end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.rehearsal.measured import STEPS, measure, total
from tests.rehearsal.test_against_ranks import of_rank
from workbench.plan.schema import Plan
from workbench.rehearsal.rehearse import rehearse

CHANGES = {
    "strategy.data.bucket_mib": 1.0,
    "training.sequence_length": 48,
    "training.micro_batch": 2,
}


held: list[object] = []
"""Collectives that are over, with their tensors, as gloo's threads hold them while they wait for a
core.
"""


def late(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, to which one rank comes late, and which another thread never lets go of."""

    def called(*arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.002)
        held.append(work := collective(*arguments, **named))
        return work

    return called


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3", "megatron-sp"])
def test_the_peak_is_the_rehearsed_one_however_late_collectives_end(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    batch = 2 if strategy == "megatron-sp" else 4
    plan = Plan.of(
        "tiny",
        gpu="local",
        gpus=2,
        strategy=strategy,
        set=CHANGES | {"training.global_batch": 2 * batch},
    )
    profile = rehearse(plan)
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, late(getattr(dist, name)))
    for rank, (allocated, _, _) in enumerate(measure(plan)):
        rehearsed = of_rank(profile, "memory", rank)
        for step in range(STEPS):
            assert total(allocated, step, "peak") == pytest.approx(
                total(rehearsed, step, "peak"), rel=0.005
            )


def largest(strategy: str, in_flight: int, category: str) -> int:
    """Bytes of a category at its own largest, in a rehearsal's second step on rank 0."""
    changes = CHANGES | {"training.global_batch": 8, "strategy.data.in_flight": in_flight}
    rows = rehearse(
        Plan.of("tiny", gpu="local", gpus=2, strategy=strategy, set=changes), [0]
    ).memory
    return int(
        rows[(rows.step == 1) & (rows.moment == "maximum") & (rows.category == category)][
            "bytes"
        ].sum()
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [2, 3])
def test_as_many_units_are_gathered_as_are_in_flight(in_flight: int) -> None:
    one = largest("zero-3", 1, "gathered")
    assert largest("zero-3", in_flight, "gathered") == in_flight * one


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "bucket"), [("zero-2", 2**20), ("zero-3", 787456)])
def test_no_more_buckets_are_reduced_than_are_in_flight(strategy: str, bucket: int) -> None:
    """One bucket is being filled; what a backward leaves alive beyond it is being reduced."""
    one, two, three = (largest(strategy, n, "communication") for n in (1, 2, 3))
    assert one == 0 < two <= bucket < three <= 2 * bucket
