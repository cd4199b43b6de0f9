"""A delayed update: what a checkpoint keeps of it, and what it may not hide."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.small import LLAMA, plan
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.session import Session, initial_drawer
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

CPU = torch.device("cpu")
STEPS = 4


def made(folder: str | None = None, **more: Any) -> ResolvedPlan:
    changes = {
        "strategy.data.zero": 2,
        "strategy.data.reduce": "microbatch",
        "strategy.data.offload": "optimizer",
        "strategy.precision": "fp16",
        "training.optimizer.delayed_update": True,
        "training.steps": STEPS,
        "checkpoint.load": folder,
        **more,
    }
    return plan(1, 1, 2, shape=LLAMA, microbatches=2, changes=changes).resolve()


def session_of(plan: ResolvedPlan, rank: int) -> Session:
    return Session.build(plan, build_mesh(plan, rank), CPU, drawer=initial_drawer(plan))


def train(session: Session, steps: range) -> list[np.ndarray]:
    """Take steps on text of their own; every value and state afterwards."""
    t = session.plan.training
    shape = (session.plan.num_microbatches, t.micro_batch, t.sequence_length)
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + session.mesh["data"].index)
        text = torch.randint(session.plan.vocab, shape, generator=generator)
        session.step(step, text, text.flip(-1))
    states = [x for of_one in session.optimizer.state().values() for x in of_one.values()]
    return [x.numpy(force=True).copy() for x in (*session.part.store.values.values(), *states)]


def uninterrupted_and_saved(plan: ResolvedPlan, folder: Path, rank: int) -> list[np.ndarray]:
    session = session_of(plan, rank)
    train(session, range(2))
    saver = SessionCheckpointer(session, folder)
    saver.save(2)
    saver.wait()
    saver.close()
    return train(session, range(2, STEPS))


def resumed(plan: ResolvedPlan, rank: int) -> list[np.ndarray]:
    session = session_of(plan, rank)
    assert SessionCheckpointer(session, Path("unused")).load() == 2
    return train(session, range(2, STEPS))


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_ranks(2, partial(uninterrupted_and_saved, made(), tmp_path))
    (folder,) = (tmp_path / "checkpoints").glob("step*")
    again = run_ranks(2, partial(resumed, made(str(folder))))
    for rank in range(2):
        assert all(np.array_equal(x, y) for x, y in zip(whole[rank], again[rank], strict=True))
    prompt = made(str(folder), **{"training.optimizer.delayed_update": False})
    with pytest.raises(Exception, match="holds gradient of its parameters, which the plan has not"):
        run_ranks(2, partial(resumed, prompt))


def test_an_update_that_fails_in_its_thread_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: MixedPrecisionOptimizer, *_: Any) -> None:
        raise ValueError("no such learning rate")

    monkeypatch.setattr(MixedPrecisionOptimizer, "step", fails)
    with pytest.raises(Exception, match="no such learning rate"):
        run_ranks(2, _two_steps)


def _two_steps(rank: int) -> None:
    train(session_of(made(), rank), range(2))
