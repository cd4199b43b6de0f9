"""Replicas of a stage that take whole microbatches in turn equal one device: also numbers of
microbatches that they do not divide, under every schedule of one chunk, and with what else runs
within a stage.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.parallel.small import GPT, LLAMA
from tests.parallel.sweep import MOE
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_replicas import failing_tensor, replicated
from workbench.engine import session as session_module
from workbench.engine.verify.equivalence import verify
from workbench.parallel.mesh import Mesh
from workbench.parallel.pipeline.schedule_executor import MicrobatchState, ScheduleExecutor
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import BatchShare
from workbench.schedules import Action

SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"]
ROUTED = MOE | {"moe": MOE["moe"] | {"auxiliary_loss": 0.01}}


def in_turn(
    replicas: list[int],
    microbatches: int,
    micro_batch: int = 2,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    changes = {"strategy.pipeline.distribution": "round_robin"} | (changes or {})
    return replicated(replicas, micro_batch, microbatches=microbatches, changes=changes, **more)


@pytest.mark.parametrize("microbatches", [2, 3, 5])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2]])
def test_two_replicas_and_one(replicas: list[int], microbatches: int) -> None:
    changes = {"strategy.data.zero": microbatches % 2}
    assert_equal_to_one_device(
        verify(in_turn(replicas, microbatches, shape=GPT, tied=True, changes=changes))
    )


@pytest.mark.drawn(6)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("replicas", "microbatches", "partition"),
    [([3, 1, 2], 4, [1, 2, 1]), ([1, 3, 2], 5, [2, 1, 1]), ([2, 3], 7, [3, 1])],
)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("shape", [LLAMA, ROUTED], ids=["llama", "moe"])
def test_drawn_replicas(
    replicas: list[int],
    microbatches: int,
    partition: list[int],
    schedule: str,
    zero: int,
    shape: dict[str, Any],
) -> None:
    changes = {
        "strategy.pipeline.schedule": schedule,
        "strategy.pipeline.partition": partition,
        "strategy.data.zero": zero,
    }
    assert_equal_to_one_device(
        verify(in_turn(replicas, microbatches, shape=shape, tied=True, changes=changes))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.tensor.size": 2},
        {"strategy.tensor.size": 2, "strategy.tensor.sequence": True},
        {"strategy.context.size": 2},
        {
            "strategy.context.size": 2,
            "strategy.placement": ["context", "data", "tensor", "pipeline"],
        },
    ],
)
def test_other_axes_within_a_stage(changes: dict[str, Any]) -> None:
    axes = {name: changes.get(f"strategy.{name}.size", 1) for name in ("tensor", "context")}
    changes = changes | {"strategy.data.zero": 1}
    assert_equal_to_one_device(verify(in_turn([2, 1], 3, tied=True, changes=changes, **axes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"training.dropout": 0.2, "strategy.pipeline.schedule": "zb-h1"},
        {"strategy.recompute": "full", "strategy.data.reduce": "microbatch"},
        {"strategy.pipeline.in_flight": [1, 2]},
        {"training.micro_batch": 1, "training.global_batch": 3},
    ],
    ids=["dropout", "recompute", "in_flight", "one sequence"],
)
def test_what_else_a_replica_does(changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(in_turn([2, 1], 3, changes=changes)))


@pytest.mark.slow
def test_fp8_scales_are_those_of_the_microbatch() -> None:
    """A replica has all of it, unlike one that shares it."""
    pytest.importorskip("torchao")
    changes = {
        "cluster.gpu": "h100-sxm-80gb",
        "strategy.precision": "fp8",
        "training.sequence_length": 32,
    }
    shape = LLAMA | {"ffn": 64, "vocab": 256, "heads": 2}
    assert_equal_to_one_device(verify(in_turn([2, 1], 3, shape=shape, changes=changes), "fp8"))


def test_a_microbatch_sent_to_the_wrong_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each two microbatches of the first stage go to each other's replica of the next."""

    def outgoing(
        self: ScheduleExecutor, action: Action, state: MicrobatchState
    ) -> tuple[Tensor, int]:
        x, peer = original(self, action, state)
        if action.kind == "SEND_F" and action.microbatch is not None:
            peer = self.table.home(action.stage + 1, action.microbatch ^ 1)
        return x, peer

    original = ScheduleExecutor._outgoing
    monkeypatch.setattr(ScheduleExecutor, "_outgoing", outgoing)
    assert failing_tensor(in_turn([1, 2], 4)) != ""


def test_targets_of_another_microbatch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(plan: ResolvedPlan, mesh: Mesh) -> BatchShare:
        found = original(plan, mesh)
        last = mesh["data"].size == 2
        return found._replace(first=2 - found.first) if last else found

    original = session_module.rank_share
    monkeypatch.setattr(session_module, "rank_share", share)
    assert failing_tensor(in_turn([1, 2], 4)) != ""
