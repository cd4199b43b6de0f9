"""What is attached to this machine: NVIDIA GPUs through NVML, else CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.errors import refuse
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU, Fabric
from workbench.machine.nvml_devices import (
    NoGpu,
    NvmlDevice,
    UnusableGpu,
    order_is_known,
    visible_gpus,
)
from workbench.units import GIB

CPU_RANKS = "`workbench doctor` says more; CUDA_VISIBLE_DEVICES= (empty) chooses CPU ranks"
ONE_SLICE = "; CUDA shows a process one MIG slice"
MORE_OF_THE_NAME = r"(?: \d+GB| HBM\d\w*| SXM\d| AC| Blackwell( \w+)* Edition| MIG .*)*"
"""What a driver may say after the model. Any other word is another model: `H200 NVL` is no `H200`,
`RTX 3090 Ti` no `RTX 3090`.
"""
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
    """Memory of the smallest GPU; of the whole machine for CPU ranks, which share it."""
    cores: int
    why_not_cuda: str = ""
    """Why no GPU is used, for `doctor`; empty if GPUs are used."""
    unusable: bool = False
    """GPUs are attached and cannot be used: `local` is then refused, and no CPU rank stands in."""
    gpus: tuple[NvmlDevice, ...] = ()
    """The GPUs in CUDA's order."""

    def names(self, ranks: int) -> list[str]:
        """Models among the first `ranks` GPUs; among all where CUDA's order is not known."""
        return list(dict.fromkeys(gpu.name for gpu in self._used(ranks))) or [self.name]

    def least_bytes(self, ranks: int) -> int:
        """Memory of the smallest among the first `ranks` GPUs, bytes."""
        return min((gpu.memory_bytes for gpu in self._used(ranks)), default=self.memory_bytes)

    def _used(self, ranks: int) -> tuple[NvmlDevice, ...]:
        return self.gpus[:ranks] if order_is_known() else self.gpus


def attached() -> Attached:
    """GPUs that this installation of torch can use; CPU ranks where there are none, or where
    CUDA_VISIBLE_DEVICES is empty. Asks NVML, imports no torch.
    """
    cores = host_cores()
    try:
        gpus = _usable_gpus()
    except (NoGpu, UnusableGpu) as error:
        ranks = cores * int(gpu_catalog.local_constants()["ranks_per_core"])
        name, unusable = f"CPU, {cores} cores", isinstance(error, UnusableGpu)
        return Attached("cpu", ranks, name, host_memory(), cores, str(error), unusable)
    least = min(gpu.memory_bytes for gpu in gpus)
    return Attached("cuda", len(gpus), gpus[0].name, least, cores, gpus=tuple(gpus))


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


def _torch_cuda() -> tuple[str, str | None]:
    """(version, CUDA version or None) of the installed torch, read from its `version.py`: builds
    without CUDA need not be called `+cpu`.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed", None
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    written = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^'\n]*)'", text, re.MULTILINE))
    return f"torch {written.get('__version__', '')}", written.get("cuda")


def _usable_gpus() -> list[NvmlDevice]:
    """Visible GPUs; raises as `visible_gpus` does, and where torch has no CUDA."""
    gpus = visible_gpus()
    version, cuda = _torch_cuda()
    if cuda is None:
        raise UnusableGpu(
            f"{len(gpus)} x {gpus[0].name} here, but {version} is a build without CUDA"
        )
    return gpus


def local_cluster(found: Attached, ranks: int) -> tuple[GPU, Fabric]:
    """The GPU and the fabric that `local` means for a job of `ranks` ranks on what was `found`.

    CPU ranks share the machine: each gets its part of cores, bandwidth and memory.
    Raises `PlanError` where more ranks are asked for than may run here, where GPUs are attached
    that cannot be used, or that are not alike.
    """
    _refuse_unusable(found, ranks)
    if ranks > found.count:
        per_core = gpu_catalog.local_constants()["ranks_per_core"]
        why = (
            f"{found.cores} cores x {per_core} ranks"
            if found.device == "cpu"
            else f"{found.count} x {found.name}{ONE_SLICE if ' MIG ' in found.name else ''}"
        )
        raise refuse(
            "cluster.gpus",
            f"is {ranks}, but only {found.count} are attached here ({why}); "
            f"legal with `gpu: local`: 1 to {found.count}, or name a GPU of the catalog",
        )
    return _cpu(found, ranks) if found.device == "cpu" else _cuda(found, ranks)


def _refuse_unusable(found: Attached, ranks: int) -> None:
    if found.unusable:
        raise refuse("cluster.gpu", f"is local, and {found.why_not_cuda}; {CPU_RANKS}")
    if len(names := found.names(ranks)) > 1:
        order = "" if order_is_known() else ", with CUDA_DEVICE_ORDER=PCI_BUS_ID"
        raise refuse(
            "cluster.gpu",
            f"is local, and the GPUs are not alike: {', '.join(names)}; ranks would wait for the "
            f"slowest; name those of one model in CUDA_VISIBLE_DEVICES{order}",
        )


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
        re.search(rf"(?:^| ){re.escape(name)}{MORE_OF_THE_NAME}$", driver_name)
        for name in entry.driver_names
    )


def _cuda(found: Attached, ranks: int) -> tuple[GPU, Fabric]:
    for entry in gpu_catalog.gpus().values():
        if _is_called(entry, found.name):
            return _part(entry.gpu, found, ranks), gpu_catalog.clusters()[entry.fabric].model_copy(
                update={"gpus_per_node": found.count}
            )
    raise refuse(
        "cluster.gpu",
        f"is local, and the attached GPU '{found.name}' is not in data/gpus.yaml; "
        "name the nearest GPU of `workbench gpus`, or write its figures out under cluster.gpu",
    )


def _part(gpu: GPU, found: Attached, ranks: int) -> GPU:
    """The catalog's GPU with the attached memory; a MIG slice has its part of compute, and of the
    bandwidth as much as of the memory (NVIDIA MIG User Guide, profiles).
    """
    compute = found.gpus[0].compute_share if found.gpus else 1.0
    gib = found.least_bytes(ranks) / GIB
    changes: dict[str, Any] = {"memory_gib": gib}
    if compute < 1 or " MIG " in found.name:
        memory = min(1.0, gib / gpu.memory_gib)
        changes["tflops"] = {dtype: rate * compute for dtype, rate in gpu.tflops.items()}
        changes |= {"title": found.name, "bandwidth_gbs": gpu.bandwidth_gbs * memory}
    return gpu.model_copy(update=changes)
