"""Estimates of models whose parameters are smaller than what aligns them in buckets, beside
rehearsal: the peak memory of every rank within 1 %, with and without operator strategies.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.costmodel.test_operator_plans import agrees, drawn_shape, with_drawn_operators
from workbench.errors import PlanError
from workbench.plan.schema import Plan


def drawn(seed: int) -> Plan:
    """A legal plan of a tiny model: others are drawn until one is."""
    rng = random.Random(seed)
    while True:
        try:
            written = _written(rng)
            written.resolve()
        except PlanError:
            continue
        if written.strategy.tensor.ranks == 1 or written.strategy.tensor.sequence:
            return written
        if rng.random() < 0.5:
            return written
        if plan := with_drawn_operators(rng, written):
            return plan


def _written(rng: random.Random) -> Plan:
    ranks, stages, data = rng.choice([1, 2]), rng.choice([1, 1, 2]), rng.choice([1, 2, 2])
    hidden, batch = rng.choice([32, 36, 40]), rng.choice([1, 2])
    shape = drawn_shape(rng, ranks) | {
        **{"hidden": hidden, "heads": 4, "kv_heads": rng.choice([2, 4])},
        **{"ffn": rng.choice([48, 52]), "vocab": rng.choice([257, 300])},
    }
    strategy: dict[str, Any] = {
        "tensor": {"size": ranks, "sequence": ranks > 1 and rng.random() < 0.3},
        "pipeline": {"size": stages},
        "data": {"zero": rng.choice([0, 1, 2, 3]), "bucket_mib": rng.choice([0.05, 25])},
        "recompute": rng.choice(["none", "full"]),
    }
    return Plan.model_validate(
        {
            "model": shape,
            "cluster": {"gpu": "local", "gpus": ranks * stages * data},
            "strategy": strategy,
            "training": {
                "sequence_length": 16,
                "micro_batch": batch,
                "global_batch": batch * data * rng.choice([2, 4]),
            },
        }
    )


@pytest.mark.parametrize("seed", range(6))
def test_an_estimate_of_a_tiny_model_is_what_every_rank_needs(seed: int) -> None:
    agrees(drawn(seed))


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(6, 80))
def test_estimates_of_tiny_models_are_what_every_rank_needs(seed: int) -> None:
    agrees(drawn(seed))
