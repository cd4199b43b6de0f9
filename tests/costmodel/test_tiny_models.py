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
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse

EXPERTS = {"experts": 4, "top_k": 2, "ffn": 12}


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


@pytest.mark.parametrize("seed", range(4))
def test_an_estimate_of_a_tiny_model_is_what_every_rank_needs(seed: int) -> None:
    agrees(drawn(seed))


STATES = ("parameters", "gradients", "optimizer", "master")


@pytest.mark.parametrize(
    ("zero", "bucket_mib", "data", "precision", "more"),
    [
        pytest.param(1, 0.002, 3, "bf16", {"strategy.pipeline.size": 2}, marks=pytest.mark.slow),
        (2, 0.01, 3, "fp32", {"strategy.tensor.size": 2}),
        (2, 0.03, 4, "bf16", {"strategy.expert.size": 2, "model.moe": EXPERTS}),
        pytest.param(3, 25, 4, "bf16", {"strategy.data.shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_are_what_the_buckets_of_an_engine_hold(
    zero: int, bucket_mib: float, data: int, precision: str, more: dict[str, Any]
) -> None:
    ranks = data * more.get("strategy.pipeline.size", 1) * more.get("strategy.tensor.size", 1)
    shape = {"layers": 2, "hidden": 24, "heads": 4, "ffn": 30, "vocab": 257, "mlp": "swiglu"}
    written = {
        "model": shape | {"norm": "layernorm"},
        "cluster": {"gpu": "local", "gpus": ranks},
        "training": {"sequence_length": 8, "micro_batch": 1, "global_batch": 2 * data},
    }
    own = {"zero": zero, "bucket_mib": bucket_mib, "reduce": "microbatch" if zero > 1 else "step"}
    own = {f"strategy.data.{name}": value for name, value in own.items()}
    plan = Plan.model_validate(written).replace(**own, **{"strategy.precision": precision}, **more)
    estimated, rehearsed = estimate(plan), rehearse(plan)
    for rank in set(rehearsed.representative.values()):
        found, there = (states(profile, rank) for profile in (estimated, rehearsed))
        counts = there.pop("optimizer") - found.pop("optimizer")
        assert found == there
        assert counts % 4 == 0 and 0 < counts <= 4 * 40  # fp32 step counts, one a tensor


def states(profile: Profile, rank: int) -> dict[str, int]:
    """Bytes by category before the last step's optimizer."""
    rows = profile.memory
    rows = rows[(rows["rank"] == rank) & (rows.moment == "before_optimizer")]
    rows = rows[(rows.step == rows.step.max()) & rows.category.isin(STATES)]
    return {category: size for category, size in zip(rows.category, rows["bytes"]) if size}


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(4, 80))
def test_estimates_of_tiny_models_are_what_every_rank_needs(seed: int) -> None:
    agrees(drawn(seed))
