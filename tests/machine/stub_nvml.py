"""NVML without a driver: the errors and constants of pynvml, the answers of a described machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"


@dataclass
class StubGpu:
    """A GPU, or a MIG slice of one. `error`: NVML's number for a refusal to tell its memory."""

    name: str = H100
    uuid: str = "GPU-0000"
    gib: float = 80.0
    reserved_gib: float = 0.5
    free_gib: float = 70.0
    slices: list[StubGpu | None] | None = None
    """By index, None for a gap; the field None: not in MIG mode."""
    error: int | None = None
    supports_v2: bool = True


def gpus(count: int, name: str = H100) -> list[StubGpu]:
    """GPUs whose UUIDs begin with different letters."""
    return [StubGpu(name, f"GPU-{letter}000") for letter in "abcdefgh"[:count]]


def install(
    patch: pytest.MonkeyPatch, machine: Sequence[StubGpu], init_error: int | None = None
) -> None:
    """Put a stub of `pynvml` that knows the GPUs of `machine` in place of the library."""
    stub = ModuleType("pynvml")
    for name, value in vars(pynvml).items():
        if name.startswith(("NVMLError", "NVML_", "nvmlMemory_v2")):
            setattr(stub, name, value)
    for function in (_init(init_error), *_asks(machine)):
        setattr(stub, function.__name__, function)
    patch.setitem(sys.modules, "pynvml", stub)


def _init(error: int | None) -> Any:
    def nvmlInit() -> None:
        if error is not None:
            raise pynvml.NVMLError(error)

    return nvmlInit


def _asks(machine: Sequence[StubGpu]) -> list[Any]:
    def nvmlShutdown() -> None: ...

    def nvmlDeviceGetCount() -> int:
        return len(machine)

    def nvmlDeviceGetHandleByIndex(index: int) -> StubGpu:
        return machine[index]

    def nvmlDeviceGetName(gpu: StubGpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(gpu: StubGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(gpu: StubGpu, version: int | None = None) -> SimpleNamespace:
        if gpu.error is not None:
            raise pynvml.NVMLError(gpu.error)
        if version and not gpu.supports_v2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        sizes = {"total": gpu.gib, "free": gpu.free_gib, "used": gpu.gib - gpu.free_gib}
        sizes |= {"reserved": gpu.reserved_gib} if version else {}
        return SimpleNamespace(**{name: int(size * GIB) for name, size in sizes.items()})

    def nvmlDeviceGetHandleByUUID(uuid: str) -> StubGpu:
        for gpu in machine:
            for one in (gpu, *(gpu.slices or [])):
                if one is not None and one.uuid == uuid:
                    return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCpuAffinity(gpu: StubGpu, words: int) -> list[int]:
        if gpu not in machine:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return [3 << 4 * machine.index(gpu)] + [0] * (words - 1)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part: StubGpu) -> StubGpu:
        return next(gpu for gpu in machine if part in (gpu.slices or []))

    def nvmlDeviceGetComputeRunningProcesses(gpu: StubGpu) -> list[object]:
        return []

    def nvmlDeviceGetMigMode(gpu: StubGpu) -> list[int]:
        return [int(gpu.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(gpu: StubGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(gpu: StubGpu, index: int) -> StubGpu:
        found = dict(enumerate(gpu.slices or [])).get(index)
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    return [value for name, value in locals().items() if name.startswith("nvml")]
