"""What real ranks measure of a plan: two steps on forked ranks, sampled as the training loop
samples them.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from workbench.engine.measure.allocator_memory import memory_meter
from workbench.engine.measure.step_sampler import StepSampler, allocated_rows
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

STEPS = 2
Rows = list[dict[str, Any]]


def measure(plan: Plan) -> list[tuple[Rows, Rows, Rows]]:
    """By rank: (the allocator's rows, rows by category, collectives), each row with its step."""
    return run_ranks(plan.world_size, partial(_measure_rank, plan.resolve()))


def _measure_rank(plan: ResolvedPlan, rank: int) -> tuple[Rows, Rows, Rows]:
    device, t = torch.device("cpu"), plan.training
    mesh = build_mesh(plan, rank)
    gauge = memory_meter(device)
    gauge.start()
    session = Session.build(plan, mesh, device)
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    batch = [torch.randint(plan.shape.vocab, shape) for _ in range(2)]
    samplers = [StepSampler(session, gauge) for _ in range(STEPS)]
    for step, sampler in enumerate(samplers):
        with sampler.step(batch):
            session.step(step, batch[0], batch[1], sampler)
    totals = allocated_rows(gauge.stop(), mesh["pipeline"].index)
    return (
        [{"step": step, **row} for step, rows in enumerate(totals) for row in rows],
        [{"step": step, **row} for step, s in enumerate(samplers) for row in s.memory_rows()],
        [{"step": step, **row} for step, s in enumerate(samplers) for row in s.collective_rows()],
    )


def total(rows: Rows, step: int, moment: str) -> int:
    """Bytes of all categories at a moment of a step."""
    found = [row["bytes"] for row in rows if (row["step"], row["moment"]) == (step, moment)]
    assert found, (step, moment)
    return sum(found)


def traffic(rows: Rows) -> Counter[tuple[Any, ...]]:
    """Calls by what distinguishes them."""
    calls: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        keys = ("step", "axis", "kind", "group_size", "dtype", "bytes", "action")
        calls[tuple(row[key] for key in keys)] += row["count"]
    return calls
