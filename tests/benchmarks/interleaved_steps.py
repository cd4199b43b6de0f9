"""Seconds of the steps of many plans, of which each world size takes turns step by step."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.garbage_collection import collected_on_common_steps
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.machine.attached import host_cores
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan

SKIPPED = 3
DEADLINE = 3600.0
Times = dict[str, dict[str, list[float]]]
"""Plan -> wall and CPU seconds (of all ranks together) of every step."""


def step_times(plans: Mapping[str, Plan], steps: int) -> Times:
    """Wall and CPU seconds of `steps` steps of each plan, all of one world size; the first
    `SKIPPED` ones are left out.

    The caller must be single-threaded, see `run_ranks`.
    """
    (world,) = {plan.world_size for plan in plans.values()}
    ranks = run_ranks(world, partial(_on_rank, plans=plans, steps=steps), DEADLINE)
    return {
        name: {
            "wall": [max(each) for each in zip(*(times[name]["wall"] for times in ranks))],
            "cpu": [sum(each) for each in zip(*(times[name]["cpu"] for times in ranks))],
        }
        for name in plans
    }


def _on_rank(rank: int, plans: Mapping[str, Plan], steps: int) -> Times:
    torch.set_num_threads(max(1, host_cores() // dist.get_world_size()))
    runs = {name: _run(plan, rank) for name, plan in plans.items()}
    found: Times = {name: {"wall": [], "cpu": []} for name in plans}
    with collected_on_common_steps() as collect:
        for index in range(SKIPPED + steps):
            collect(index)
            for name, (session, tokens) in runs.items():
                dist.barrier()
                wall, cpu = time.perf_counter(), _cpu_seconds()
                session.step(index, tokens, tokens)
                if index >= SKIPPED:
                    found[name]["wall"].append(time.perf_counter() - wall)
                    found[name]["cpu"].append(_cpu_seconds() - cpu)
    return found


def _run(plan: Plan, rank: int) -> tuple[Session, Any]:
    full = plan.resolve()
    session = Session.build(full, build_mesh(full, rank, torch.device("cpu")), torch.device("cpu"))
    for _ in session.warm_up():
        pass
    t, generator = full.training, torch.Generator().manual_seed(rank)
    shape = full.num_microbatches, t.micro_batch, t.sequence_length
    return session, torch.randint(full.shape.vocab, shape, generator=generator)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
