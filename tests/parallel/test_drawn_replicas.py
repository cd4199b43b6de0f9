"""Drawn plans whose stages have replicas of their own equal one device, on 3 to 8 ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_replicas import replicated
from workbench.engine.verify.equivalence import verify
from workbench.plan.schema import Plan
from workbench.schedules import bounded_names

PLANS = 32
MOST_RANKS = 8


def drawn_plan(seed: int) -> Plan:
    """A legal plan whose stages have unequal replicas, of which one at least does not divide a
    microbatch.
    """
    draw = random.Random(seed)
    tensor = draw.choice((1, 1, 2))
    replicas = unequal_replicas(draw, MOST_RANKS // tensor)
    most = max(replicas)
    uneven = [size for size in range(most, 2 * most + 2) if any(size % r for r in replicas)]
    partition = [draw.randint(1, 2) for _ in replicas]
    shape = {**draw.choice((GPT, LLAMA)), "layers": sum(partition)}
    changes = {
        "strategy.tensor.sequence": tensor > 1 and draw.random() < 0.5,
        "strategy.pipeline.partition": partition,
        **drawn_schedule(draw, len(replicas)),
        "strategy.data.zero": draw.choice((0, 1)),
        "strategy.recompute": draw.choice(("none", "selective", "full", [0])),
        "training.dropout": draw.choice((0.0, 0.2)),
        "training.optimizer.clip": draw.choice((None, 0.5)),
    }
    return replicated(
        replicas,
        draw.choice(uneven),
        shape=shape,
        microbatches=draw.randint(1, 6),
        tied=draw.random() < 0.5,
        changes=changes,
        tensor=tensor,
    )


def unequal_replicas(draw: random.Random, ranks: int) -> list[int]:
    """Replicas of two to four stages on three ranks or more, not all of them alike."""
    while True:
        found = [draw.randint(1, 4) for _ in range(draw.randint(2, 4))]
        if 3 <= sum(found) <= ranks and len(set(found)) > 1:
            return found


def drawn_schedule(draw: random.Random, stages: int) -> dict[str, Any]:
    """A schedule of one chunk, and where it takes a bound on microbatches in flight one or none."""
    name = draw.choice(("gpipe", "1f1b", "eager-1f1b", "zb-h1"))
    each = sorted((draw.randint(1, 5) for _ in range(stages)), reverse=True)
    bounds: list[Any] = [None, draw.randint(1, 4), each] if name in bounded_names() else [None]
    return {"strategy.pipeline.schedule": name, "strategy.pipeline.in_flight": draw.choice(bounds)}


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("seed", range(PLANS))
def test_a_drawn_plan_equals_one_device(seed: int) -> None:
    assert_equal_to_one_device(verify(drawn_plan(seed)))


def test_what_is_drawn_is_legal_and_has_every_choice() -> None:
    plans = [drawn_plan(seed).resolve() for seed in range(PLANS)]
    pipelines = [plan.strategy.pipeline for plan in plans]
    assert {plan.world_size for plan in plans} >= {3, 4, 5, 6, 7, 8}
    assert {p.schedule for p in pipelines} == {"gpipe", "1f1b", "eager-1f1b", "zb-h1"}
    assert {type(p.in_flight) for p in pipelines} == {type(None), int, list}
    assert {plan.strategy.tensor.sequence for plan in plans} == {False, True}
    assert all(
        any(plan.training.micro_batch % count for count in plan.strategy.pipeline.replicas or [])
        for plan in plans
    )
