"""A GPU or MIG slice as NVML knows it, by UUID: its index is not CUDA's where CUDA_VISIBLE_DEVICES
hides or reorders GPUs.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, NamedTuple

WORD_BITS = 64
"""Cores in each number of NVML's masks."""


def nvml_cores(uuid: str) -> set[int]:
    """CPU cores near the GPU, or near that of the MIG slice, with this UUID, as torch gives it
    (without the leading `GPU-` or `MIG-`).

    Raises an error of NVML's family where it knows no such GPU.
    """
    import pynvml  # only where there are GPUs

    pynvml.nvmlInit()
    try:
        handle, is_slice = _handle(pynvml, uuid)
        if is_slice:
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        words = -(-(os.cpu_count() or 1) // WORD_BITS)
        masks = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
        bits = range(len(masks) * WORD_BITS)
        return {bit for bit in bits if masks[bit // WORD_BITS] >> bit % WORD_BITS & 1}
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: ModuleType, uuid: str) -> tuple[Any, bool]:
    """(handle, whether it is a MIG slice's)."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), False
    except Exception:  # whose family NVML alone knows
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"), True
        except Exception:
            pass
        raise


class MemoryUsed(NamedTuple):
    """Bytes in use on a GPU; of one process None where NVML does not tell."""

    by_all: int
    by_process: int | None


def nvml_memory_used(uuid: str, pid: int) -> MemoryUsed:
    """Bytes that NVML reports in use on the GPU or MIG slice with this UUID, by all and by process
    `pid`.

    NVML knows processes by the host's numbers, which a container's are not: the only process on a
    GPU is then this one. Raises an error of NVML's family where it knows no such GPU.
    """
    import pynvml  # only where there are GPUs

    pynvml.nvmlInit()
    try:
        handle, _ = _handle(pynvml, uuid)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        own = [process for process in processes if process.pid == pid] or processes
        size = own[0].usedGpuMemory if len(own) == 1 else None
        return MemoryUsed(used, None if size is None else int(size))
    finally:
        pynvml.nvmlShutdown()
