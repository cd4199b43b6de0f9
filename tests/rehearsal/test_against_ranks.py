"""A rehearsal without bytes equals real ranks: peaks within two per cent, traffic call by call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.rehearsal.measured import STEPS, Rows, measure, total, traffic
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

CASES = {
    "single": ("tiny", 1, "single"),
    "ddp": ("tiny", 2, "ddp"),
    "megatron-tp": ("tiny", 2, "megatron-tp"),
    "dapple": ("tiny", 2, "dapple"),
    "gpipe": ("tiny", 2, "gpipe"),
    "tensor-pipeline": ("tiny", 4, "tensor-pipeline"),
    "sequence": ("tiny", 2, "megatron-sp"),
    "shared key-value heads": ("tiny", 4, "megatron-tp"),
    "usp": ("tiny", 4, "usp"),
    "zero-1": ("tiny", 2, "zero-1"),
    "zero-2": ("tiny", 2, "zero-2"),
    "zero-3": ("tiny-gpt", 2, "zero-3"),
    "zero-offload": ("tiny-gpt", 2, "zero-offload"),
    "zero-infinity": ("tiny", 2, "zero-infinity"),
    "tiles": ("tiny", 2, "zero-infinity"),
    "gpt, tied": ("tiny-gpt", 2, "dapple"),
    "gpt, tied, four": ("tiny-gpt", 4, "tensor-pipeline"),
}
SOME = ("megatron-tp", "tensor-pipeline", "usp", "zero-2", "zero-offload")
"""Measured by `make test` in fp32, and by continuous integration in 16 bits too: what is measured
serves four tests.
"""


def marked(case: str, precision: str) -> Any:
    """A case, marked by where it runs."""
    narrow, other = precision == "bf16", case not in SOME
    marks = [pytest.mark.slow] * (narrow or other) + [pytest.mark.sweep] * (narrow and other)
    return pytest.param(case, precision, marks=marks)


EACH = pytest.mark.parametrize(
    ("case", "precision"), [marked(case, p) for p in ("fp32", "bf16") for case in CASES]
)


def plan(case: str, precision: str) -> ResolvedPlan:
    model, gpus, strategy = CASES[case]
    changes: dict[str, Any] = {
        "strategy.precision": precision,
        "strategy.data.bucket_mib": 1.0,
        "training.sequence_length": 48,
        "training.micro_batch": 2,
        "training.global_batch": 6 * (gpus if strategy == "ddp" or "zero" in strategy else 1),
    }
    if case == "tiles":
        changes |= {"strategy.data.tile_factor": 2, "strategy.recompute": "full"}
    return Plan.of(model, gpu="local", gpus=gpus, strategy=strategy, set=changes).resolve()


@lru_cache
def both(case: str, precision: str) -> tuple[Profile, list[tuple[Rows, Rows, Rows]]]:
    """A rehearsal, and what every rank measured."""
    found = plan(case, precision)
    ranks = [(whole, on_device(rows), calls) for whole, rows, calls in measure(found)]
    return rehearse(found), ranks


def on_device(rows: Rows) -> Rows:
    """Rows without those of host memory, which no allocator of a rank sees."""
    return [row for row in rows if row.get("tier") != "host"]


def of_rank(profile: Profile, kind: str, rank: int) -> Rows:
    """Rows of the rank that was rehearsed for `rank`."""
    frame = getattr(profile, kind)
    rows: Rows = frame[frame["rank"] == profile.representative[rank]].to_dict("records")
    return on_device(rows)


@EACH
def test_rehearsed_peak_is_the_allocators_peak(case: str, precision: str) -> None:
    profile, ranks = both(case, precision)
    for rank, (allocated, _, _) in enumerate(ranks):
        rehearsed = of_rank(profile, "memory", rank)
        for step in range(STEPS):
            real = total(allocated, step, "peak")
            assert total(rehearsed, step, "peak") == pytest.approx(real, rel=0.02), (rank, step)


@EACH
def test_what_lasts_is_the_allocators_level_between_steps(case: str, precision: str) -> None:
    profile, ranks = both(case, precision)
    for rank, (allocated, _, _) in enumerate(ranks):
        real = total(allocated, 1, "initialised")
        assert total(of_rank(profile, "memory", rank), 1, "initialised") == pytest.approx(
            real, rel=0.01
        ), rank


@EACH
def test_categories_are_those_of_real_ranks(case: str, precision: str) -> None:
    profile, ranks = both(case, precision)
    for rank, (_, counted, _) in enumerate(ranks):
        for category in ("parameters", "gradients", "optimizer", "activations", "logits"):
            real, rehearsed = (
                max(
                    (
                        r["bytes"]
                        for r in rows
                        if (r["moment"], r["category"]) == ("maximum", category)
                    ),
                    default=0,
                )
                for rows in (counted, of_rank(profile, "memory", rank))
            )
            assert rehearsed == pytest.approx(real, rel=0.02), (rank, category)


@EACH
def test_traffic_is_that_of_real_ranks_call_by_call(case: str, precision: str) -> None:
    profile, ranks = both(case, precision)
    for rank, (_, _, calls) in enumerate(ranks):
        assert traffic(of_rank(profile, "collectives", rank)) == traffic(calls), rank
    axes = {row["axis"] for _, _, calls in ranks for row in calls}
    sizes = plan(case, precision).sizes
    # Gradients are summed over data x context, and reported under data.
    sizes = sizes | {"data": sizes["data"] * sizes["context"]}
    assert axes >= {name for name, size in sizes.items() if size > 1}
    assert not axes & {name for name, size in sizes.items() if size == 1}
