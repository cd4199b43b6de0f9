"""Stages with replicas of their own equal one device: uneven shares of a microbatch, every schedule
of one chunk, tied weights, ZeRO-1, context parallelism within a stage; what is planted is found.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.parallel.small import GPT, LLAMA
from tests.parallel.test_equality import assert_equal_to_one_device
from workbench.engine import session as session_module
from workbench.engine.verify.equivalence import verify
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.pipeline import stage_transfers
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import BatchShare


def replicated(
    replicas: list[int],
    micro_batch: int,
    *,
    shape: dict[str, Any] = LLAMA,
    microbatches: int = 4,
    tied: bool = False,
    changes: dict[str, Any] | None = None,
    **axes: int,
) -> Plan:
    """A small plan whose stages have these replicas; `axes` are sizes of tensor and context."""
    ranks = sum(replicas)
    for size in axes.values():
        ranks *= size
    written = {
        "model": {**shape, "tied": tied},
        "cluster": {"gpu": "local", "gpus": ranks},
        "strategy": {
            "pipeline": {"size": len(replicas), "replicas": replicas},
            "data": {"bucket_mib": 0.01},
            **{axis: {"size": size} for axis, size in axes.items()},
        },
        "training": {
            "sequence_length": 16,
            "global_batch": microbatches * micro_batch,
            "micro_batch": micro_batch,
            "steps": 3,
            "optimizer": {"clip": 0.5, "learning_rate": 1e-2},
        },
    }
    return Plan.model_validate(written).replace(**(changes or {}))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batch", [2, 3])
def test_two_replicas_and_one(micro_batch: int, tied: bool) -> None:
    assert_equal_to_one_device(verify(replicated([2, 1], micro_batch, shape=GPT, tied=tied)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_one_replica_and_two(schedule: str) -> None:
    changes = {"strategy.pipeline.schedule": schedule, "strategy.data.zero": 1}
    assert_equal_to_one_device(verify(replicated([1, 2], 3, tied=True, changes=changes)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.context.size": 2, "strategy.data.zero": 1},
        {
            "strategy.context.size": 2,
            "strategy.placement": ["context", "data", "tensor", "pipeline"],
        },
    ],
)
def test_context_parallelism_within_a_stage(changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(replicated([2, 1], 3, tied=True, changes=changes, context=2)))


@pytest.mark.parametrize(
    "changes",
    [
        {"training.dropout": 0.2},
        {"strategy.pipeline.schedule": "zb-h2"},
        {"strategy.data.reduce": "microbatch"},
    ],
    ids=["dropout", "zb-h2", "reduce"],
)
def test_one_choice_beside_replicas(changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(replicated([2, 1], 3, changes=changes)))


def failing_tensor(plan: Plan) -> str:
    answer = verify(plan)
    assert not answer["passed"] and answer["worst"]["relative"] > 100 * answer["tolerance"], answer
    return str(answer["worst"]["tensor"])


def test_a_transfer_of_other_sequences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(x: Tensor, peer: int, axis: MeshAxis) -> list[tuple[int, Tensor]]:
        found = original(x, peer, axis)
        parts = [part for _, part in found]
        return [(rank, part) for (rank, _), part in zip(found, parts[::-1])]

    original = stage_transfers._shared
    monkeypatch.setattr(stage_transfers, "_shared", shared)
    assert failing_tensor(replicated([2, 1], 2)) != ""


def test_a_tied_weight_that_one_replica_does_not_sum_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exchange(own: Tensor, theirs: Tensor, axis: MeshAxis, *of: Any) -> None:
        original(own, theirs, axis, *of)
        if axis.index == 1:
            theirs.zero_()

    original = stage_transfers._exchange_between_replicas
    monkeypatch.setattr(stage_transfers, "_exchange_between_replicas", exchange)
    assert failing_tensor(replicated([2, 1], 2, tied=True)) == "embedding.tokens.weight"


def test_a_share_of_other_sequences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage reads targets as if its replicas shared a microbatch the other way around."""

    def share(plan: ResolvedPlan, mesh: Mesh) -> BatchShare:
        found = original(plan, mesh)
        last = mesh["pipeline"].index == mesh["pipeline"].size - 1
        return found._replace(first=1 - found.first) if last else found

    original = session_module.rank_share
    monkeypatch.setattr(session_module, "rank_share", share)
    assert failing_tensor(replicated([1, 2], 2)) != ""
