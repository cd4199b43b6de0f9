"""A GPU as NVML knows it, by UUID: its index is not CUDA's where CUDA_VISIBLE_DEVICES hides or
reorders GPUs.
"""

from __future__ import annotations

from typing import NamedTuple


def nvml_index(uuid: str) -> int:
    """NVML's index of the GPU with this UUID, as torch gives it (without the leading `GPU-`).

    Raises an error of NVML's family where it knows no such GPU.
    """
    import pynvml  # only where there are GPUs

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))
    finally:
        pynvml.nvmlShutdown()


class MemoryUsed(NamedTuple):
    """Bytes in use on a GPU; of one process None where NVML does not tell."""

    by_all: int
    by_process: int | None


def nvml_memory_used(uuid: str, pid: int) -> MemoryUsed:
    """Bytes that NVML reports in use on the GPU with this UUID, by all and by process `pid`.

    NVML knows processes by the host's numbers, which a container's are not: the only process on a
    GPU is then this one. Raises an error of NVML's family where it knows no such GPU.
    """
    import pynvml  # only where there are GPUs

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        own = [process for process in processes if process.pid == pid] or processes
        size = own[0].usedGpuMemory if len(own) == 1 else None
        return MemoryUsed(used, None if size is None else int(size))
    finally:
        pynvml.nvmlShutdown()
