"""The search of unequal stages against every plan of tiny jobs, by their estimates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from workbench.errors import PlanError
from workbench.plan.rules.legal_sizes import divisors
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.search import search

LARGEST_GAP = 0.05
FEW_TOKENS = (2, 4, 4096, 1000, 12)
"""A replica of one stage runs three sequences at once where all GPUs would share a microbatch of
three: it takes 0.7 times as long as three times one.
"""
CONSTANT_SHARE = (3, 4, 512, 50000, 12)
"""The optimizer and a step's overhead, which the latency model leaves out, are a third."""


def drawn_jobs(seed: int, number: int) -> list[tuple[int, ...]]:
    """(GPUs, layers, hidden size, vocabulary, sequences of a step)."""
    draw = random.Random(seed)
    kinds = ((2, 3), (3, 4), (512, 1024, 2048), (1000, 50000), (6, 8))
    return [tuple(draw.choice(kind) for kind in kinds) for _ in range(number)]


def sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as so many numbers from 1."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in sums(total - first, parts - 1))


def every_plan(job: Plan, gpus: int, layers: int, batch: int) -> Iterator[Plan]:
    """Cuts, replicas, microbatches, warm-up policies and ZeRO stages."""
    for stages in range(1, min(gpus, layers) + 1):
        schedules = ("1f1b", "eager-1f1b") if stages > 1 else ("1f1b",)
        for replicas, cut, each, schedule, zero in product(
            sums(gpus, stages), sums(layers, stages), divisors(batch), schedules, (0, 1)
        ):
            pipeline = {"size": stages, "partition": list(cut), "schedule": schedule}
            even = all(a == b for a, b in pairwise(replicas)) and each % replicas[0] == 0
            if not even:
                pipeline["replicas"] = list(replicas)
            micro_batch = each // replicas[0] if even else each
            yield job.replace(
                **{
                    "strategy.pipeline": pipeline,
                    "strategy.data.zero": zero,
                    "training.micro_batch": micro_batch,
                }
            )


def least_seconds(plans: Iterator[Plan]) -> float:
    """Of the legal ones."""
    found = []
    for plan in plans:
        try:
            found.append(estimate(plan).step_seconds)
        except PlanError:  # more replicas than sequences of a microbatch
            continue
    return min(seconds for seconds in found if seconds is not None)


@pytest.mark.parametrize("sizes", [FEW_TOKENS, CONSTANT_SHARE, *drawn_jobs(0, 4)])
def test_no_plan_is_much_faster_than_what_is_found(sizes: tuple[int, ...]) -> None:
    gpus, layers, hidden, vocab, batch = sizes
    shape = {"layers": layers, "hidden": hidden, "heads": 8, "ffn": 4 * hidden, "vocab": vocab}
    plan = Plan.model_validate({"model": shape, "cluster": {"gpu": "rtx-4090", "gpus": gpus}})
    job = plan.replace(**{"training.global_batch": batch, "training.sequence_length": 256})
    where = ["strategy.tensor.size=1", "strategy.recompute=none"]
    first = search(job, space="unequal", top=1, where=where).top[0]
    least = least_seconds(every_plan(job, gpus, layers, batch))
    assert least <= first.seconds * (1 + 1e-9)
    assert first.seconds <= least * (1 + LARGEST_GAP)
