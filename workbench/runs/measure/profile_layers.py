"""Layer profiles: measured in a child process, of one device, whatever the plan's parallelism."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import ChildError, PlanError, refuse
from workbench.machine.attached import Attached, attached, host_memory
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.layer_profile_csv import (
    is_layer_profile,
    read_layer_profile,
    write_layer_profile,
)
from workbench.plan.model.layer_profile_file import profiled_model
from workbench.plan.model.parameter_count import parameters
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan, ProfiledModel, build_plan
from workbench.runs.launch import child_process
from workbench.runs.launch.kernel_compilers import missing_compiler, missing_torchao
from workbench.runs.launch.preflight import gpu_problems
from workbench.runs.measure.calibrate import refuse_unwritable
from workbench.safe_io.files import unread
from workbench.units import GIB

Progress = Callable[[float, float, str], None]
LEAST_SECONDS, MOST_SECONDS = 0.1, 3600.0
PREPARING_SECONDS = 600.0
"""Beside the passes: importing torch, drawing weights, compiling kernels, a first slow pass."""
OF_ONE_DEVICE = ("precision", "gradient_dtype", "attention", "recompute", "kernels", "stack")
"""Fields of the strategy that a single device has too."""


def profile_layers(
    plan: Plan,
    path: Path,
    seconds: float,
    allow_code: bool = False,
    progress: Progress | None = None,
) -> LayerProfile:
    """Measure the layers of `plan` and write them to `path`; see `workbench.profile_layers`."""
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise refuse("--seconds", f"is {seconds:g}; legal: {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    _refuse_output(path)
    full = plan.resolve()
    require(full, "run", allow_code)
    single, found = single_device_plan(full), attached()
    _refuse_this_machine(single, found)

    def on_line(text: str) -> None:
        if progress and (record := child_process.progress_record(text)):
            words = str(record.get("words", ""))
            progress(min(record["done"], record["of"]), record["of"], words)

    with tempfile.TemporaryDirectory() as folder:
        to, written = Path(folder, "layers.csv"), Path(folder, "plan.yaml")
        written.write_text(single.to_yaml(), encoding="utf-8")
        arguments = [str(written), "--to", str(to), "--seconds", str(seconds)]
        child_process.python(
            "workbench.engine.layer_times",
            arguments + ["--allow-code"] * allow_code,
            on_line,
            threads=_threads(full, found),
            deadline_seconds=seconds + PREPARING_SECONDS,
        )
        if not to.exists():  # a model's os._exit(0)
            raise ChildError("measuring ended without layers, and said no reason")
        measured = read_layer_profile(to)
    _write(measured, path)
    return measured


def _refuse_output(path: Path) -> None:
    """Refuse a file that no plan could name as its model, that cannot be written, or that holds
    something else: the plan, its corpus.
    """
    if profiled_model(str(path)) != ProfiledModel(layer_profile=str(path)):
        raise refuse("--output", f"is '{path}'; legal: a name that ends in .csv, e.g. layers.csv")
    refuse_unwritable(path)
    if path.exists() and not is_layer_profile(path):
        raise refuse(
            "--output",
            f"'{path}' exists and is no layer profile; legal: a new file, or a layer profile to "
            "replace",
        )


def _write(measured: LayerProfile, path: Path) -> None:
    try:
        write_layer_profile(measured, path)
    except OSError as error:
        raise refuse("--output", f"'{path}' cannot be written: {unread(error)}") from None


def single_device_plan(full: ResolvedPlan) -> ResolvedPlan:
    """The plan of one device that computes one microbatch of a complete plan at a time."""
    data: dict[str, Any] = full.model_dump()
    cluster = {"gpus": 1, "nodes": 1, "gpus_per_node": 1, "calibration": None}
    cluster["calibration_sha256"] = None
    changed = {
        "strategy": {name: data["strategy"][name] for name in OF_ONE_DEVICE},
        "cluster": data["cluster"] | cluster,
        full.task_section: data[full.task_section] | {"global_batch": full.task.micro_batch},
        "checkpoint": {},
    }
    return build_plan(data | changed).resolve()


def _threads(full: ResolvedPlan, found: Attached) -> int:
    """As many as a CPU rank of the plan has beside the others of this machine."""
    ranks = min(full.world_size, int(full.cluster.gpus_per_node or 1))
    return max(1, found.cores // ranks)


def _refuse_this_machine(single: ResolvedPlan, found: Attached) -> None:
    """Refuse another device than is attached, what it lacks, and a model that it cannot hold."""
    problems = [
        *gpu_problems(single, found),
        *missing_compiler(single.strategy.kernels, single.gpu.device),
        *missing_torchao(single.strategy.precision),
    ]
    if problems:
        raise PlanError(problems)
    if single.code:  # its size is known only when it is built
        return
    each = state_bytes(single)
    need = parameters(single.shape).total * (each.parameter + each.gradient)
    have = host_memory() if single.gpu.device == "cpu" else found.least_bytes(1)
    if need > have:
        raise refuse(
            "model",
            f"{single.shape.name} has {need / GIB:.1f} GiB of parameters and gradients, one "
            f"device here has {have / GIB:.1f} GiB; legal: the same model with fewer layers, whose "
            "rows may be repeated",
        )
