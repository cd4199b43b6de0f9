"""A rank's life: join, build, train, tell, save, leave."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from workbench.engine.gpu_binding import gpu_record, join_gpus
from workbench.engine.loop import Loop
from workbench.engine.measure.telemetry_writer import RankLog, Telemetry, set_aside, write_error
from workbench.engine.precision import set_attention, set_products
from workbench.engine.rendezvous import join_cpus
from workbench.errors import PlanError
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.runs.launch.external_launcher import ExternalRun

GLOO, NCCL = "gloo", "nccl"


def train(plan_path: Path, allow_code: bool = False) -> int:
    """Train the plan in its run directory; 0 when it ended or was stopped, 1 when it failed.

    A model that is code runs only with `allow_code`.
    """
    run_dir, rank = plan_path.parent, int(os.environ.get("RANK", "0"))
    loop: Loop | None = None
    elsewhere = ExternalRun(run_dir, rank)
    set_aside(run_dir, rank)
    with RankLog(run_dir, rank), Telemetry(run_dir, rank) as telemetry:
        try:
            plan = Plan.load(plan_path).resolve()
            require(plan, "run", allow_code)
            set_products(plan)
            set_attention(plan)
            elsewhere.begin(plan)
            accelerator = join(plan, run_dir)
            mesh = build_mesh(plan, rank, accelerator.device)
            telemetry.record("hello", **hello(plan, mesh, accelerator.device))
            elsewhere.running()
            loop = Loop(plan, run_dir, mesh, accelerator, telemetry)
            loop.run()
        except BaseException as error:
            step, doing = (loop.index, loop.follower.doing) if loop else (None, "joining")
            write_error(run_dir, rank, step, doing, error)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, PlanError):
                print(f"error: {error}", file=sys.stderr)
            else:
                traceback.print_exception(error)
            return _leave(1, elsewhere)
    return _leave(0, elsewhere)


def _leave(code: int, elsewhere: ExternalRun) -> int:
    """Wait for the other ranks where all went well: none may go while another still needs what it
    sent.
    """
    if dist.is_initialized() and code == 0:
        dist.barrier()
    elsewhere.end(code)
    return code


def join(plan: ResolvedPlan, run_dir: Path) -> Accelerator:
    """Enter the process group, and hold the launcher to the plan: world size, backend and device
    must be its own.

    Raises RuntimeError where they are not: a launcher that quietly started fewer ranks would train
    something else; and `PlanError` where a rank's GPU is not the plan's.
    """
    if plan.gpu.device == "cuda":
        join_gpus(plan)
    elif plan.gpu.device == "cpu":
        join_cpus(plan)
    deadline = InitProcessGroupKwargs(timeout=timedelta(seconds=plan.telemetry.timeout_seconds))
    accelerator = Accelerator(
        cpu=plan.gpu.device == "cpu",
        kwargs_handlers=[deadline],
        log_with=list(plan.telemetry.trackers) or None,
        project_dir=str(run_dir),
    )
    world = dist.get_world_size() if dist.is_initialized() else 1
    backend = dist.get_backend() if dist.is_initialized() else None
    expected = GLOO if plan.gpu.device == "cpu" else NCCL
    if world != plan.world_size:
        raise RuntimeError(
            f"cluster.gpus is {plan.world_size}, but the launcher started {world} ranks"
        )
    if world > 1 and backend != expected:
        raise RuntimeError(
            f"the plan's card ({plan.gpu.device}) needs backend {expected}, the launcher chose "
            f"{backend}"
        )
    if accelerator.device.type != plan.gpu.device:
        raise RuntimeError(
            f"cluster.gpu is a {plan.gpu.device} card, but this rank has {accelerator.device}"
        )
    return accelerator


def hello(plan: Plan, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """The first record of a rank."""
    return {
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": str(device),
        "gpu": gpu_record(device),
        "epoch_offset": time.time() - time.monotonic(),
        "coordinates": mesh.coordinate(),
        "stage": mesh["pipeline"].index,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
        },
    }
