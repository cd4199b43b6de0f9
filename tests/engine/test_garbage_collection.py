"""Garbage is collected after the same steps on every rank, and no step leaves tensors to it."""

import gc
from typing import Any

import pytest
import torch

from workbench.engine import garbage_collection
from workbench.engine.garbage_collection import collected_on_common_steps
from workbench.engine.measure.allocator_memory import memory_meter
from workbench.engine.measure.step_sampler import ActionTracker, StepSampler
from workbench.engine.measure.step_timeline import StepTimeline
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan

CPU = torch.device("cpu")


def test_collections_are_after_common_steps_only() -> None:
    """Cycles enough to start the collector by itself, were it enabled."""
    step, collected = -1, []

    def note(phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            collected.append(step)

    with collected_on_common_steps() as collect:
        gc.callbacks.append(note)
        try:
            for step in range(1, 2 * garbage_collection.COLLECT_EVERY + 2):
                for _ in range(gc.get_threshold()[0] // 10):
                    cycle: list[Any] = []
                    cycle.append(cycle)
                collect(step)
        finally:
            gc.callbacks.remove(note)
    assert collected == [garbage_collection.COLLECT_EVERY, 2 * garbage_collection.COLLECT_EVERY]
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("model", "strategy", "recompute", "sampled"),
    [
        ("tiny", "zero-3", "full", False),
        ("tiny-moe", "expert-parallel", "none", True),
        pytest.param("tiny", "dapple", "selective", False, marks=pytest.mark.slow),
        pytest.param("tiny", "ring-attention", "none", True, marks=pytest.mark.slow),
    ],
)
def test_steps_leave_no_tensor_to_the_collector(
    model: str, strategy: str, recompute: str, sampled: bool
) -> None:
    """What waits for a collection would be held for `COLLECT_EVERY` steps."""
    changes: dict[str, Any] = {"training.sequence_length": 16, "training.global_batch": 4}
    changes |= {"training.micro_batch": 1, "strategy.recompute": recompute}
    plan = Plan.of(model, gpu="local", gpus=2, strategy=strategy, set=changes).resolve()

    def work(rank: int) -> int:
        session = Session.build(plan, build_mesh(plan, rank), CPU)
        tokens = torch.zeros((plan.num_microbatches, 1, 16), dtype=torch.long)
        session.step(0, tokens, tokens, ActionTracker())
        with collected_on_common_steps():
            gc.set_debug(gc.DEBUG_SAVEALL)
            for index in (1, 2):
                _step(session, index, tokens, sampled)
            gc.collect()
            return sum(isinstance(left, torch.Tensor) for left in gc.garbage)

    assert run_ranks(2, work, seconds=60) == [0, 0]


def _step(session: Session, index: int, tokens: torch.Tensor, sampled: bool) -> None:
    if not sampled:
        timeline = StepTimeline(session)
        with timeline.step():
            session.step(index, tokens, tokens, timeline)
        timeline.collective_rows()
        return
    meter = memory_meter(CPU)
    meter.start()
    sampler = StepSampler(session, meter)
    with sampler.step():
        session.step(index, tokens, tokens, sampler)
    meter.stop()
