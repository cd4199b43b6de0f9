"""Plans trained on gloo's ranks under the sanitizer, with the collectives that NCCL would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from tests.sanitizer.async_sanitizer import AsyncSanitizer, Violation
from workbench.engine import session
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel import async_collectives
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

NUM_STEPS = 2
CPU = torch.device("cpu")
SINGLE_CALLS = ("_all_gather", "_reduce_scatter")
"""Of `async_collectives`, where NCCL has one call and gloo several."""


Transport = Literal["nccl", "gloo"]
"""Whose calls an all-gather or a reduce-scatter is made of; gloo's ranks run either."""


def violations(
    plan: Plan | ResolvedPlan, transport: Transport = "nccl", seconds: float = 120.0
) -> list[Violation]:
    """What all ranks find in building a session, `NUM_STEPS` training steps and an evaluation."""
    resolved = plan if isinstance(plan, ResolvedPlan) else plan.resolve()
    found = run_ranks(resolved.world_size, partial(_train, resolved, transport), seconds)
    return [each for of_rank in found for each in of_rank]


def _train(plan: ResolvedPlan, transport: Transport, rank: int) -> list[Violation]:
    calls = as_on_nccl() if transport == "nccl" else nullcontext()
    with calls, AsyncSanitizer() as sanitizer:
        built = Session.build(plan, build_mesh(plan, rank, CPU), CPU)
        for step in range(NUM_STEPS):
            built.step(step, *_batch(plan, built, step))
            sanitizer.expect_none_in_flight()
        built.evaluate(*_batch(plan, built, NUM_STEPS))
    return sanitizer.violations


@contextmanager
def as_on_nccl() -> Iterator[None]:
    """Within, all-gather and reduce-scatter are started as on NCCL, and sends waited for as there.

    On gloo an all-gather is made of broadcasts, and a reduce-scatter of an all-reduce. gloo's own
    ask for shapes that NCCL's do not ask for; flat tensors have them.
    """
    changed = {name: _on_flat(getattr(async_collectives, name)) for name in SINGLE_CALLS}
    with (
        mock.patch.dict(vars(async_collectives), changed, _on_gloo=lambda axis: False),
        mock.patch.object(session, "_sends_end", lambda *of_rank: None),
    ):
        yield


def _on_flat(collective: Callable[..., object]) -> Callable[..., object]:
    def run(output: Tensor, source: Tensor, **kwargs: Any) -> object:
        return collective(output.view(-1), source.view(-1), **kwargs)

    return run


def _batch(plan: ResolvedPlan, built: Session, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, which the ranks of a data coordinate share."""
    generator = torch.Generator().manual_seed(100 * step + built.mesh["data"].index)
    shape = (plan.num_microbatches, plan.training.micro_batch, plan.training.sequence_length + 1)
    text = torch.randint(plan.vocab, shape, generator=generator)
    return text[..., :-1], text[..., 1:]
