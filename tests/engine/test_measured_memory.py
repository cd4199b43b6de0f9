"""Measured memory is the allocator's, whatever the counter of live bytes says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.rehearsal.measured import measure
from workbench.engine.measure import step_sampler
from workbench.engine.measure.allocator_memory import memory_meter
from workbench.engine.measure.live_memory import LiveBytes
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan


class Liar(LiveBytes):
    """Counts nothing, and says that everything is a terabyte of parameters."""

    def memory_rows(self, stage: int, tier: str = "device") -> list[dict[str, Any]]:
        return [
            {
                "stage": stage,
                "moment": moment,
                "tier": tier,
                "category": "parameters",
                "bytes": 2**40,
            }
            for moment in ("peak", "maximum")
        ]

    @property
    def current(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("gpus, strategy", [(1, "single"), (2, "dapple")])
def test_a_lying_counter_leaves_the_total_alone(
    gpus: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training.sequence_length": 32, "training.global_batch": 4}
    plan = Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=changes)
    honest = measure(plan)
    monkeypatch.setattr(step_sampler, "LiveBytes", Liar)
    lied = measure(plan)
    for (truth, _, _), (total, categories, _) in zip(honest, lied, strict=True):
        assert {row["bytes"] for row in categories} == {2**40}
        assert {row["category"] for row in total} == {"allocated"}
        for before, after in zip(truth, total, strict=True):
            assert after["moment"] == before["moment"]
            assert after["bytes"] == pytest.approx(before["bytes"], rel=0.001)


def test_memory_that_no_counter_sees_is_in_the_total() -> None:
    """A step makes a tensor behind the counter's back; the total has it."""
    plan = Plan.of(
        "tiny", gpu="local", gpus=1, strategy="single", set={"training.sequence_length": 32}
    )
    hidden = 64 * 2**20
    before, after = (_totals(plan, size) for size in (0, hidden))
    assert after["allocated"] - before["allocated"] == pytest.approx(hidden, rel=0.01)
    assert after["counted"] == before["counted"]


def _totals(plan: Plan, hidden: int) -> dict[str, int]:
    totals: dict[str, int] = run_ranks(1, partial(_measured, plan.resolve(), hidden))[0]
    return totals


def _measured(plan: ResolvedPlan, hidden: int, rank: int) -> dict[str, int]:
    device = torch.device("cpu")
    gauge = memory_meter(device)
    gauge.start()
    session = Session.build(plan, build_mesh(plan, rank), device)
    sampler = step_sampler.StepSampler(session, gauge)
    text = torch.zeros((plan.num_microbatches, 1, plan.training.sequence_length), dtype=torch.long)
    with sampler.step():
        with _disable_current_modes():
            unseen = torch.empty(hidden, dtype=torch.uint8)
        session.step(0, text, text, sampler)
    del unseen
    (total,) = step_sampler.allocated_rows(gauge.stop(), 0)
    counted = sum(row["bytes"] for row in sampler.memory_rows() if row["moment"] == "peak")
    return {"allocated": total[0]["bytes"], "counted": counted}
