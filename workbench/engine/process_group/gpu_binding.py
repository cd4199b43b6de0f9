"""Binding of ranks to GPUs, checked against the plan before anything is built.

Accelerate takes GPU LOCAL_RANK modulo the number of GPUs, so that two ranks may share one, which
NCCL reports only at its first collective; and where torch cannot use the driver it makes every rank
a world of its own.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from workbench.engine.process_group.cpu_affinity import bind_cores
from workbench.engine.process_group.rendezvous import join_deadline, join_store
from workbench.errors import PlanError, Problem, refuse
from workbench.interop.launch_environment import FORMER_NAMES
from workbench.machine.attached import is_another_model
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.diagnose.flight_recorder import PREFIX

DUMPS = "TORCH_FR_DUMP_TEMP_FILE"
"""Where torch's flight recorder writes; it appends the rank."""
VERDICT_READ_TIMEOUT = timedelta(seconds=10)
"""Time that rank 0, which serves the store, waits for every rank to read its verdict."""
VERDICT = "gpus/verdict"
"""Key of the problems that rank 0 found."""


class RankGpu(NamedTuple):
    """A rank's GPU: its host, its index there, and the driver's uuid and name."""

    host: str
    local: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.local} of {self.host} ({self.uuid})"


def init_gpu_process_group(plan: ResolvedPlan, run_dir: Path) -> None:
    """Bind this rank's GPU, check the GPUs of all ranks, and join the process group over NCCL.

    Accelerate uses an existing process group as it is. A process that no launcher started joins
    none.

    Args:
        plan: The plan.
        run_dir: The run directory, which all nodes must see.

    Raises:
        PlanError: On every rank, where a GPU is missing, shared, or of another model than the
            plan's, or the run directory is not shared.
    """
    device, deadline = bind_gpu(plan), join_deadline(plan)
    if "RANK" not in os.environ:
        _settle(_problems(plan, [gpu_of(device)]))
        return
    store, rank, world = join_store(plan, deadline, run_dir)
    check_gpus(plan, gpu_of(device), store, rank, world)
    _name_dumps(run_dir)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, timeout=deadline, device_id=device
    )


def _name_dumps(run_dir: Path) -> None:
    """Let torch's flight recorder write to the run directory, unless the user says where."""
    (run_dir / "logs").mkdir(exist_ok=True)
    for name in run_dir.glob(f"logs/{PREFIX}*"):
        name.unlink(missing_ok=True)  # of an earlier launch
    if FORMER_NAMES[DUMPS] not in os.environ:
        os.environ.setdefault(DUMPS, str(run_dir / "logs" / PREFIX))


def bind_gpu(plan: ResolvedPlan) -> torch.device:
    """Make GPU LOCAL_RANK the current device, and keep this rank on the cores near it.

    Raises:
        PlanError: torch has no such GPU.
    """
    index, host = int(os.environ.get("LOCAL_RANK", "0")), socket.gethostname()
    if not torch.cuda.is_available():
        raise refuse(
            "cluster.gpu", f"is {plan.gpu.name}, but torch has no GPU on {host}: {why_not_cuda()}"
        )
    count = torch.cuda.device_count()
    if index >= count:
        message = f"gives {host} a local rank {index} (from 0), but torch has {count} GPUs there"
        raise refuse("cluster.gpus", f"{message}; legal: at most {count} ranks on this node")
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    bind_cores(device, min(count, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return device


def why_not_cuda() -> str:
    """Why torch has no GPU here, in the driver's words."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def gpu_of(device: torch.device) -> RankGpu:
    """The GPU of a CUDA `device`, as the driver reports it."""
    found = torch.cuda.get_device_properties(device)
    return RankGpu(socket.gethostname(), device.index, str(found.uuid), found.name)


def gpu_record(device: torch.device) -> dict[str, str] | None:
    """The GPU for a rank's first telemetry record; None for CPU ranks."""
    return (
        {"uuid": (own := gpu_of(device)).uuid, "name": own.name} if device.type == "cuda" else None
    )


def check_gpus(plan: ResolvedPlan, own: RankGpu, store: dist.Store, rank: int, world: int) -> None:
    """Check the GPUs of all ranks against the plan.

    Every rank writes its GPU to the store; rank 0 reads them all, and the others read its verdict:
    a few requests per rank instead of world size squared.

    Args:
        plan: The plan.
        own: This rank's GPU.
        store: The rendezvous store.
        rank: This rank.
        world: World size.

    Raises:
        PlanError: The same on every rank.
    """
    store.set(_key(rank), json.dumps(own))
    if rank == 0:
        found = _problems(plan, [_read(plan, store, each) for each in range(world)])
        store.set(VERDICT, json.dumps([(problem.field, problem.message) for problem in found]))
    problems = [Problem(field, message) for field, message in json.loads(store.get(VERDICT))]
    store.set(_read_by(rank), "")
    if rank == 0:  # the store ends with this rank, which may hold it
        with suppress(dist.DistStoreError):
            store.wait([_read_by(each) for each in range(world)], VERDICT_READ_TIMEOUT)
    _settle(problems)


def _read_by(rank: int) -> str:
    return f"gpus/read/{rank}"


def _key(rank: int) -> str:
    return f"gpus/{rank}"


def _read(plan: Plan, store: dist.Store, rank: int) -> RankGpu:
    try:
        return RankGpu(*json.loads(store.get(_key(rank))))
    except dist.DistStoreError:
        waited = f"{join_deadline(plan).total_seconds():g} s (telemetry.timeout_seconds)"
        raise RuntimeError(f"rank {rank} did not say which GPU it has within {waited}") from None


def _problems(plan: ResolvedPlan, gpus: list[RankGpu]) -> list[Problem]:
    """GPUs (in order of rank) of another model than the plan's, or shared by several ranks."""
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
