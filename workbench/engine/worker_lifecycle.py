"""Lifecycle of a worker: join the process group, build the session, train, save, report, leave."""

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

from workbench.engine.loop import TrainingLoop
from workbench.engine.measure.telemetry_writer import RankLog, TelemetryWriter, write_error
from workbench.engine.precision import set_determinism, set_matmul_precision
from workbench.engine.process_group.cpu_affinity import limit_threads
from workbench.engine.process_group.gpu_binding import gpu_record, init_gpu_process_group
from workbench.engine.process_group.rendezvous import init_cpu_process_group
from workbench.errors import PlanError
from workbench.interop.launch_environment import one_node
from workbench.machine.attached import host_cores
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.rank_placement import rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.runs.launch.earlier_launch import go_on, nothing_left, set_aside_records
from workbench.runs.launch.external_launcher import ExternalRun

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def train(plan_path: Path, allow_code: bool = False) -> int:
    """Train the plan in its run directory.

    Args:
        plan_path: RUN/plan.yaml; its folder is the run directory.
        allow_code: Run a model that is given as Python.

    Returns:
        The exit code: 0 when training ended or was stopped, 1 when it failed.
    """
    run_dir, rank = plan_path.parent, int(os.environ.get("RANK", "0"))
    if why := nothing_left(plan_path):  # and the records of the launch that did it stay
        print(f"error: {why}", file=sys.stderr)
        return 1
    loop: TrainingLoop | None = None
    try:
        elsewhere = ExternalRun(run_dir, rank)
    except PlanError as error:  # and the records of the launch that lives stay
        print(f"error: {error}", file=sys.stderr)
        return 1
    set_aside_records(run_dir, rank)
    stage = "starting"
    with RankLog(run_dir, rank), TelemetryWriter(run_dir, rank) as telemetry:

        def joining(group: str) -> None:
            # hello comes after the mesh: a rank that waits for a group has said for which one.
            nonlocal stage
            stage = f"joining {group}"
            telemetry.record("phase", phase="joining", step=None, detail=group)

        try:
            plan, skipped = go_on(Plan.load(plan_path).resolve(), run_dir)
            require(plan, "run", allow_code)
            set_matmul_precision(plan)
            set_determinism(plan)
            elsewhere.begin(plan, skipped)
            joining("the process group")
            accelerator = join_launch(plan, run_dir)
            mesh = build_mesh(plan, rank, accelerator.device, joining)
            telemetry.record("hello", **hello_record(plan, mesh, accelerator.device))
            stage = "building"
            elsewhere.running()
            loop = TrainingLoop(plan, run_dir, mesh, accelerator, telemetry)
            loop.run()
        except BaseException as error:
            step, action = (loop.index, loop.action_tracker.current) if loop else (None, stage)
            write_error(run_dir, rank, step, action, error)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, PlanError):
                print(f"error: {error}", file=sys.stderr)
            else:
                traceback.print_exception(error)
            return _leave(1, elsewhere)
    return _leave(0, elsewhere)


def _leave(code: int, elsewhere: ExternalRun) -> int:
    """Synchronise before leaving: no rank may exit while another still receives from it.

    After a failure there is no barrier, because the others may never reach it.
    """
    if dist.is_initialized() and code == 0:
        dist.barrier()
    elsewhere.end(code)
    return code


def join_launch(plan: ResolvedPlan, run_dir: Path) -> Accelerator:
    """Join the process group, and check that the launcher started what the plan says.

    World size, backend and device must be the plan's: a launcher that silently started fewer ranks
    would train with another batch size.

    Args:
        plan: The plan.
        run_dir: The run directory, where Accelerate's trackers write too.

    Returns:
        The Accelerator of this rank.

    Raises:
        RuntimeError: World size, backend or device differ from the plan's.
        PlanError: A rank's GPU is not the plan's.
    """
    limit_threads(host_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if plan.gpu.device == "cuda":
        init_gpu_process_group(plan, run_dir)
    elif plan.gpu.device == "cpu":
        init_cpu_process_group(plan, run_dir)
    deadline = InitProcessGroupKwargs(timeout=timedelta(seconds=plan.telemetry.timeout_seconds))
    accelerator = Accelerator(
        cpu=plan.gpu.device == "cpu",
        kwargs_handlers=[deadline],
        log_with=list(plan.telemetry.trackers) or None,
        project_dir=str(run_dir),
    )
    world = dist.get_world_size() if dist.is_initialized() else 1
    backend = dist.get_backend() if dist.is_initialized() else None
    expected = BACKENDS[plan.gpu.device]
    if world != plan.world_size:
        raise RuntimeError(
            f"cluster.gpus is {plan.world_size}, but the launcher started {world} ranks"
        )
    if world > 1 and backend != expected:
        raise RuntimeError(
            f"the plan's device ({plan.gpu.device}) needs backend {expected}, the launcher chose "
            f"{backend}"
        )
    if accelerator.device.type != plan.gpu.device:
        raise RuntimeError(
            f"cluster.gpu is a {plan.gpu.device} device, but this rank has {accelerator.device}"
        )
    return accelerator


def hello_record(plan: ResolvedPlan, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """The first telemetry record of a rank: where it runs, with what, and its clock's offset."""
    stage = rank_place(plan, mesh.rank).stage
    return {
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "node": None if one_node(plan) else int(os.environ.get("GROUP_RANK", "0")),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "device": str(device),
        "gpu": gpu_record(device),
        "cores": host_cores(),
        "epoch_offset": time.time() - time.monotonic(),
        "coordinates": mesh.coordinate() | {"pipeline": stage},
        "stage": stage,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
        },
    }
