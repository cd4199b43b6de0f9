"""Cost of fused and compiled kernels relative to eager ones, from this project's committed
benchmarks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU

KERNEL_BENCHMARKS_FOLDER = "data/benchmarks"
"""Holds `kernels-<GPU>.json`, which `make gpu-bench` and `make cpu-bench` write."""


@dataclass(frozen=True)
class MeasuredKernels:
    """Memory traffic of memory-bound operators and of the loss, relative to eager ones on the same
    machine.
    """

    traffic: float
    loss: float
    source: str
    """Device, date and torch version of the measurement."""


def measured_kernels(gpu: GPU, kernels: str) -> MeasuredKernels | None:
    """Measured cost of `kernels` (compiled, fused) on a GPU; None where there is no benchmark of
    it.

    A CPU's benchmark stands for all CPUs, a GPU's for that GPU alone.
    """
    found = next((b for b in kernel_benchmarks() if _measured_on(b, gpu)), None)
    if found is None or kernels not in found.get("traffic", {}):
        return None
    traffic, loss = found["traffic"], found["loss_bytes"]
    where = f"measured {found['date']} on {found['device']}, torch {found['versions']['torch']}"
    return MeasuredKernels(
        traffic[kernels] / traffic["eager"],
        loss[kernels] / loss["eager"] if loss["eager"] else 1.0,
        where,
    )


def kernel_cost_source(gpu: GPU, kernels: str) -> str:
    """Source of the cost of compiled or fused `kernels` on `gpu`, for people."""
    if found := measured_kernels(gpu, kernels):
        return found.source
    counted = "of each operator" if gpu.device == "cuda" else "of each seam, data/planner.yaml"
    return f"not measured on {gpu.name}: by the bytes {counted}"


@lru_cache(maxsize=1)
def kernel_benchmarks() -> tuple[dict[str, Any], ...]:
    """All committed kernel benchmarks."""
    return tuple(
        json.loads(path.read_text())
        for path in sorted((data_files.assets() / KERNEL_BENCHMARKS_FOLDER).glob("kernels-*.json"))
    )


def _measured_on(benchmark: dict[str, Any], gpu: GPU) -> bool:
    if benchmark["kind"] == "cpu":
        return gpu.device == "cpu"
    entry = gpu_catalog.gpus().get(gpu.name)
    return entry is not None and benchmark["device"] in entry.driver_names
