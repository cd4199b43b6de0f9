"""Which GPU a rank has, held to the plan before anything is built.

accelerate takes GPU LOCAL_RANK modulo the number that is there, so that two ranks share one, which
NCCL tells only at its first collective; and where torch cannot use the driver it makes every rank a
world of its own.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from workbench.engine.rendezvous import meet
from workbench.errors import PlanError, Problem, refuse
from workbench.machine.attached import is_another_model
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

HEARD = timedelta(seconds=10)
"""How long rank 0 waits until every rank has read its verdict."""
VERDICT = "gpus/verdict"
"""Key of the problems that rank 0 found."""


class Gpu(NamedTuple):
    """A rank's GPU: the host it is in, its index there, and what the driver calls it."""

    host: str
    local: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.local} of {self.host} ({self.uuid})"


def join_gpus(plan: ResolvedPlan) -> None:
    """Take this rank's GPU, compare it with those of all ranks, and enter the process group over
    NCCL.

    accelerate takes a group that is there as it is. A process without a launcher is alone, and
    enters none. Raises `PlanError` on every rank where a GPU is missing, shared, or of another
    model than the plan's.
    """
    device, deadline = take_gpu(plan), timedelta(seconds=plan.telemetry.timeout_seconds)
    if "RANK" not in os.environ:
        _settle(_problems(plan, [own_gpu(device)]))
        return
    store, rank, world = meet(plan, deadline)
    compare(plan, own_gpu(device), store, rank, world)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, timeout=deadline, device_id=device
    )


def take_gpu(plan: ResolvedPlan) -> torch.device:
    """Make GPU LOCAL_RANK the current one. Raises `PlanError` where torch has no such GPU."""
    index, host = int(os.environ.get("LOCAL_RANK", "0")), socket.gethostname()
    if not torch.cuda.is_available():
        raise refuse(
            "cluster.gpu", f"is {plan.gpu.name}, but torch has no GPU on {host}: {_why_not_cuda()}"
        )
    count = torch.cuda.device_count()
    if index >= count:
        message = f"gives {host} a local rank {index} (from 0), but torch has {count} GPUs there"
        raise refuse("cluster.gpus", f"{message}; legal: at most {count} ranks on this node")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _why_not_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def own_gpu(device: torch.device) -> Gpu:
    """What the driver tells of a CUDA `device`."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(socket.gethostname(), device.index, str(found.uuid), found.name)


def gpu_record(device: torch.device) -> dict[str, str] | None:
    """The GPU as a rank's first record names it; None for CPU ranks."""
    return (
        {"uuid": (own := own_gpu(device)).uuid, "name": own.name} if device.type == "cuda" else None
    )


def compare(plan: ResolvedPlan, own: Gpu, store: dist.Store, rank: int, world: int) -> None:
    """Tell `store` this rank's GPU, and hold those of all `world` ranks to the plan.

    Rank 0 reads them all and the others its verdict, so that the store answers a few requests a
    rank. Raises `PlanError`, alike on every rank.
    """
    store.set(_key(rank), json.dumps(own))
    if rank == 0:
        found = _problems(plan, [_read(plan, store, each) for each in range(world)])
        store.set(VERDICT, json.dumps([(problem.field, problem.message) for problem in found]))
    problems = [Problem(field, message) for field, message in json.loads(store.get(VERDICT))]
    store.set(_read_by(rank), "")
    if rank == 0:  # the store ends with this rank, which may hold it
        with suppress(dist.DistStoreError):
            store.wait([_read_by(each) for each in range(world)], HEARD)
    _settle(problems)


def _read_by(rank: int) -> str:
    return f"gpus/read/{rank}"


def _key(rank: int) -> str:
    return f"gpus/{rank}"


def _read(plan: Plan, store: dist.Store, rank: int) -> Gpu:
    try:
        return Gpu(*json.loads(store.get(_key(rank))))
    except dist.DistStoreError:
        waited = f"{plan.telemetry.timeout_seconds} s (telemetry.timeout_seconds)"
        raise RuntimeError(f"rank {rank} did not say which GPU it has within {waited}") from None


def _problems(plan: ResolvedPlan, gpus: list[Gpu]) -> list[Problem]:
    """Of the ranks' `gpus`, in order of rank: those of another model, and those that several ranks
    share.
    """
    found: list[Problem] = []
    owners: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        owners.setdefault(gpu.uuid, []).append(rank)
    others = [
        f"rank {rank} has {gpu}"
        for rank, gpu in enumerate(gpus)
        if is_another_model(plan.gpu, gpu.name)
    ]
    if others:
        found.append(Problem("cluster.gpu", f"is {plan.gpu.name}, but {_few(others)}"))
    shared = [
        f"ranks {' and '.join(map(str, ranks))} share {gpus[ranks[0]]}"
        for ranks in owners.values()
        if len(ranks) > 1
    ]
    if shared:
        found.append(
            Problem("cluster.gpus", f"is {plan.world_size}, one GPU a rank, but {_few(shared)}")
        )
    return found


def _few(words: list[str], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    rest = len(words) - most
    return "; ".join(words[:most]) + (f"; and {rest} more" if rest > 0 else "")


def _settle(problems: list[Problem]) -> None:
    if problems:
        raise PlanError(problems)
