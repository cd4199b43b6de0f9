"""What is attached to this machine: NVIDIA GPUs through NVML, else CPU ranks."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workbench.errors import refuse
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU, Fabric
from workbench.units import GIB

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's limits stand."""


@dataclass(frozen=True)
class Attached:
    """The devices that ranks of this machine may use."""

    device: Literal["cuda", "cpu"]
    count: int
    """Ranks that may run here: GPUs, or CPU ranks."""
    name: str
    memory_bytes: int
    """Memory of one GPU; of the whole machine for CPU ranks, which share it."""
    cores: int
    why_not_cuda: str = ""
    """Why no GPU is used, for `doctor`; empty if GPUs are used."""


def attached() -> Attached:
    """GPUs that this installation of torch can use, else CPU ranks; asks NVML, imports no
    torch.
    """
    cores = host_cores()
    reason, gpus = _gpus()
    if gpus:
        name, memory = gpus[0]
        return Attached("cuda", len(gpus), name, memory, cores)
    ranks = cores * int(gpu_catalog.local_constants()["ranks_per_core"])
    return Attached("cpu", ranks, f"CPU, {cores} cores", host_memory(), cores, reason)


def host_cores() -> int:
    """Cores that this process may use: its affinity, or its container's share if that is less."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return cores


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container it runs in if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _gpus() -> tuple[str, list[tuple[str, int]]]:
    """(why there are none, [(driver's name, bytes)]) of the GPUs that torch would see."""
    if _torch_is_cpu_only():
        return "the installed torch is a CPU build", []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own family of errors, and OSError without a driver
        return f"NVML: {error}", []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            (_text(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total))
            for h in handles
        ]
    except pynvml.NVMLError as error:
        return f"NVML: {error}", []
    finally:
        pynvml.nvmlShutdown()
    seen = [gpus[index] for index in _visible(len(gpus))]
    return ("", seen) if seen else ("CUDA_VISIBLE_DEVICES hides every GPU", [])


def _torch_is_cpu_only() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def _visible(count: int) -> list[int]:
    """Indexes of the GPUs that CUDA_VISIBLE_DEVICES leaves; a GPU named by its UUID counts as the
    next one.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(count))
    words = [word.strip() for word in chosen.split(",")]
    indexes = [
        int(word) if word.isdigit() else place
        for place, word in enumerate(words)
        if word not in ("", "-1")
    ]
    return [index for index in indexes if index < count]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def local_cluster(found: Attached, ranks: int) -> tuple[GPU, Fabric]:
    """The GPU and the fabric that `local` means for a job of `ranks` ranks on what was `found`.

    CPU ranks share the machine: each gets its part of cores, bandwidth and memory.
    Raises `PlanError` where more ranks are asked for than may run here.
    """
    if ranks > found.count:
        per_core = gpu_catalog.local_constants()["ranks_per_core"]
        why = (
            f"{found.cores} cores x {per_core} ranks"
            if found.device == "cpu"
            else f"{found.count} x {found.name}"
        )
        raise refuse(
            "cluster.gpus",
            f"is {ranks}, but only {found.count} are attached here ({why}); "
            f"legal with `gpu: local`: 1 to {found.count}, or name a GPU of the catalog",
        )
    return _cpu(found, ranks) if found.device == "cpu" else _cuda(found)


def _cpu(found: Attached, ranks: int) -> tuple[GPU, Fabric]:
    k = gpu_catalog.local_constants()
    share = min(1.0, found.cores / ranks)
    flops = k["gflops_per_core"] * share / 1000
    gpu = GPU(
        name="local",
        title=found.name,
        device="cpu",
        memory_gib=found.memory_bytes / GIB / ranks,
        bandwidth_gbs=k["bandwidth_gbs"] / max(1, min(ranks, found.cores)),
        tflops={"fp32": flops, "bf16": flops * k["bf16_ratio"]},
        link_gbs=k["link_gbs"],
        pcie_gbs=k["link_gbs"],
        watts=None,
        source=k["source"],
    )
    fabric = Fabric(
        name="local",
        gpus_per_node=found.count,
        nic_gbs=k["link_gbs"],
        link_latency_us=k["link_latency_us"],
        nic_latency_us=k["link_latency_us"],
        source=k["source"],
    )
    return gpu, fabric


def is_another_model(gpu: GPU, driver_name: str) -> bool:
    """Whether a GPU that the driver calls `driver_name` is not of the catalog's model that `GPU`
    is.

    False where the catalog does not know how drivers call it, as of a GPU that a plan writes out.
    """
    entry = gpu_catalog.gpus().get(gpu.name)
    return entry is not None and bool(entry.driver_names) and not _is_called(entry, driver_name)


def _is_called(entry: gpu_catalog.GPUEntry, driver_name: str) -> bool:
    return any(
        re.search(rf"{re.escape(name)}(?![0-9A-Za-z])", driver_name) for name in entry.driver_names
    )


def _cuda(found: Attached) -> tuple[GPU, Fabric]:
    for entry in gpu_catalog.gpus().values():
        if _is_called(entry, found.name):
            gpu = entry.gpu.model_copy(update={"memory_gib": found.memory_bytes / GIB})
            return gpu, gpu_catalog.clusters()[entry.fabric].model_copy(
                update={"gpus_per_node": found.count}
            )
    raise refuse(
        "cluster.gpu",
        f"is local, and the attached GPU '{found.name}' is not in data/gpus.yaml; "
        "name the nearest GPU of `workbench gpus`, or write its figures out under cluster.gpu",
    )
