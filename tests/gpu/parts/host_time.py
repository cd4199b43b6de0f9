"""Where the host's time of a step goes: Python calls, operators, launches; beside plain PyTorch.

Steps of a tiny width have no work for a GPU, so that their time is the host's. The same number of
layers at the widths of `step_time` says how much of it a GPU waits for.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.gpu.checks import Check, Evidence
from tests.gpu.parts.plain_model import plain_step
from tests.gpu.parts.step_time import LLAMA_1B
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

STEPS, SKIPPED, PROFILED = 20, 3, 2
LISTED = 40
NARROW = {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 1024}
FEW = {"layers": 2}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
NO_GPU = "a CPU has no queue of kernels"

Step = Callable[[int], object]
Table = list[dict[str, Any]]


def plan_of(kernels: str, evidence: Evidence, narrow: bool) -> ResolvedPlan:
    """A model of `LLAMA_1B`'s layers, two microbatches a step; two layers in a dry run."""
    changes: dict[str, Any] = {
        "strategy.precision": "bf16",
        "strategy.kernels": kernels,
        "training.sequence_length": 128 if narrow else 2048,
        "training.micro_batch": 1 if narrow else 2,
        "training.global_batch": 2 if narrow else 4,
        "model": {**LLAMA_1B, **(NARROW if narrow else {}), **(FEW if evidence.dry else {})},
    }
    return Plan.of("tiny", gpu="local", gpus=1, strategy="single", set=changes).resolve()


def step_of(plan: ResolvedPlan, device: torch.device) -> Step:
    """The engine's step, on a batch that is on the device already."""
    session, t = Session.build(plan, build_mesh(plan, 0, device), device), plan.training
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    tokens, targets = (torch.randint(plan.vocab, shape, device=device) for _ in range(2))
    return lambda index: session.step(index, tokens, targets)


def _timed(step: Step, device: torch.device, steps: int) -> dict[str, float]:
    """Medians: until the host has enqueued a step, until it is done, and the process's CPU time."""
    found = []
    for index in range(steps):
        _wait(device)
        began, cpu = time.perf_counter(), time.process_time()
        step(index)
        enqueued = time.perf_counter() - began
        _wait(device)
        found.append((enqueued, time.perf_counter() - began, time.process_time() - cpu))
    middle = [statistics.median(each) for each in zip(*found[SKIPPED:])]
    return dict(zip(("enqueued", "done", "cpu"), middle))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _operators(step: Step, device: torch.device) -> tuple[Table, Table]:
    """(operators on the host, kernels on the GPU) of torch's profiler, by own time, microseconds a
    step.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as taken:
        for index in range(PROFILED):
            step(STEPS + index)
        _wait(device)
    rows = taken.key_averages()
    kernels = [row for row in rows if row.device_type == DeviceType.CUDA]
    return _table(rows, "self_cpu_time_total"), _table(kernels, "self_device_time_total")


def _table(rows: Iterable[Any], column: str) -> Table:
    kept = [
        {"name": row.key[:80], "calls": row.count / PROFILED, "us": getattr(row, column) / PROFILED}
        for row in rows
        if getattr(row, column)
    ]
    return sorted(kept, key=lambda row: -row["us"])


def _python_calls(step: Step, device: torch.device) -> tuple[int, Table]:
    """(calls a step, rows by own time) of Python functions, backward's included, which runs in this
    thread for once.
    """
    with torch.autograd.set_multithreading_enabled(False):
        step(0)
        _wait(device)
        profiler = cProfile.Profile()
        profiler.runcall(step, 0)
    rows = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    table = [
        {
            "name": f"{'/'.join(Path(file).parts[-2:])}:{line} {name}",
            "calls": calls,
            "us": 1e6 * own,
        }
        for (file, line, name), (_, calls, own, _, _) in rows.items()
    ]
    return sum(row["calls"] for row in table), sorted(table, key=lambda row: -row["us"])


def narrow_steps(kernels: str, evidence: Evidence) -> None:
    """A step that has no work for a GPU."""
    plan = plan_of(kernels, evidence, narrow=True)
    step, device = step_of(plan, evidence.device), evidence.device
    seconds = _timed(step, device, SKIPPED + 2 if evidence.dry else STEPS)
    units = plan.shape.layers * plan.num_microbatches
    host, _ = _operators(step, device)
    calls, functions = _python_calls(step, device)
    counted = {row["name"]: row["calls"] for row in host}
    launched = sum(counted.get(name, 0) for name in LAUNCHES)
    evidence.measured(
        "per layer and microbatch",
        {
            **{f"microseconds {name}": 1e6 * value / units for name, value in seconds.items()},
            "Python calls": calls / units,
            "launches": launched / units,
        },
    )
    evidence.measured("operators", host[:LISTED])
    evidence.measured("functions", functions[:LISTED])
    evidence.expect("the step was profiled", calls > 0 and len(host) > 0)
    if evidence.on_gpu(NO_GPU, "kernels are launched", "the host does not wait"):
        waits = {name: counted[name] for name in WAITS if counted.get(name, 0) > 1}
        evidence.expect("kernels are launched", launched, counted=launched)
        evidence.expect("the host does not wait", not waits, waits=waits)


def plain_steps(evidence: Evidence) -> None:
    """The same of plain PyTorch: `nn.Module`s and `torch.optim.AdamW`."""
    plan, device = plan_of("eager", evidence, narrow=True), evidence.device
    step = plain_step(plan, device)
    seconds = _timed(step, device, SKIPPED + 2 if evidence.dry else STEPS)
    units = plan.shape.layers * plan.num_microbatches
    calls, functions = _python_calls(step, device)
    per_unit = {f"microseconds {name}": 1e6 * value / units for name, value in seconds.items()}
    evidence.measured("per layer and microbatch", {**per_unit, "Python calls": calls / units})
    evidence.measured("operators", _operators(step, device)[0][:LISTED])
    evidence.measured("functions", functions[:LISTED])
    evidence.expect("the step was profiled", calls > 0)


def wide_steps(kernels: str, evidence: Evidence) -> None:
    """A step at the widths of `step_time`: what the host takes, and what the GPU."""
    name = "the GPU has work"
    if not evidence.on_gpu(NO_GPU, name):
        return
    step, device = step_of(plan_of(kernels, evidence, narrow=False), evidence.device), "cuda"
    seconds = _timed(step, torch.device(device), STEPS // 2)
    host, kernels_run = _operators(step, torch.device(device))
    busy = 1e-6 * sum(row["us"] for row in kernels_run)
    evidence.measured("seconds", {**seconds, "GPU computes": busy})
    evidence.measured("operators", host[:LISTED])
    evidence.measured("GPU", kernels_run[:LISTED])
    evidence.expect(name, busy > 0, seconds=busy)


KERNELS = ("eager", "fused")
CHECKS = [
    *(Check(f"narrow, {kernels}", partial(narrow_steps, kernels), 60) for kernels in KERNELS),
    Check("narrow, plain PyTorch", plain_steps, 60),
    *(Check(f"wide, {kernels}", partial(wide_steps, kernels), 90) for kernels in KERNELS),
]
