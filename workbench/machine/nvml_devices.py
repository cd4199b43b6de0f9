"""GPUs and MIG slices that a CUDA process here would see, asked of NVML: no CUDA context.

As a program it only asks: `doctor` sees by it whether the driver answers.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.machine.cuda_visible_devices import hides_all, visible_indexes

DEVICE_NODES = Path("/dev")
"""Where the driver puts a node nvidia0, nvidia1, ... for each GPU."""


class NoGpu(Exception):
    """No NVIDIA GPU is attached, or CUDA_VISIBLE_DEVICES hides them all on purpose."""


class UnusableGpu(Exception):
    """GPUs are attached, and cannot be used."""


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU, or a MIG slice of one."""

    name: str
    uuid: str
    memory_bytes: int
    """What processes may allocate: NVML's total less what the driver keeps for itself."""
    free_bytes: int
    compute_share: float = 1.0
    """Part of the GPU's multiprocessors; below 1 of a MIG slice."""


def visible_gpus() -> list[NvmlDevice]:
    """GPUs in the order of a CUDA process.

    Raises:
        NoGpu: There are none here, or none are wanted.
        UnusableGpu: There are, but the driver, a permission or CUDA_VISIBLE_DEVICES is wrong.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    pynvml = _nvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        raise _no_answer(f"NVML: {error}", error.value in absent) from None
    try:
        if not (count := int(pynvml.nvmlDeviceGetCount())):
            raise NoGpu("the NVIDIA driver has no GPU")
        if hides_all(value):
            raise NoGpu(f"CUDA_VISIBLE_DEVICES is {value!r}, which chooses CPU ranks")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return _chosen(pynvml, handles, value)
    except pynvml.NVMLError as error:
        raise UnusableGpu(f"NVML does not describe the attached GPUs: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def has_device_nodes() -> bool:
    """Whether a driver has made the node of a GPU here, whether or not it answers."""
    return any(DEVICE_NODES.glob("nvidia[0-9]*"))


def order_is_known() -> bool:
    """Whether CUDA numbers unlike GPUs as NVML does; its default puts the fastest first."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _nvml() -> ModuleType:
    try:
        import pynvml  # here alone: machines without the package plan as well
    except ImportError:
        raise _no_answer("the package nvidia-ml-py is not installed", True) from None
    return pynvml  # type: ignore[no-any-return]


def _no_answer(why: str, absent: bool) -> Exception:
    """What NVML's silence means; `absent`: it may be that there is no driver at all."""
    if absent and not has_device_nodes():
        return NoGpu(f"no NVIDIA driver ({why})")
    if hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return NoGpu("CUDA_VISIBLE_DEVICES hides every GPU, which chooses CPU ranks")
    return UnusableGpu(f"the NVIDIA driver does not answer ({why})")


def _chosen(nvml: ModuleType, handles: list[Any], value: str | None) -> list[NvmlDevice]:
    if value is not None and value.strip().startswith("MIG-"):
        slices = [one for handle in handles for one in _mig_slices(nvml, handle) or []]
        places = visible_indexes(value, [one.uuid for one in slices])
        return _first_slice([slices[place] for place in places], value)
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen = [handles[place] for place in visible_indexes(value, uuids)]
    if not chosen:
        raise UnusableGpu(_nothing_named(value, len(handles)))
    split = [_mig_slices(nvml, handle) for handle in chosen]
    if all(slices is None for slices in split):
        return [_device(nvml, handle) for handle in chosen]
    if any(slices is None for slices in split):
        raise UnusableGpu(
            "some of the GPUs are split by MIG and some are not; name the unsplit ones, or one "
            "slice, by UUID in CUDA_VISIBLE_DEVICES (`nvidia-smi -L` lists them)"
        )
    return _first_slice([one for slices in split for one in slices or []], value)


def _first_slice(slices: list[NvmlDevice], value: str | None) -> list[NvmlDevice]:
    """CUDA shows a process one MIG slice, however many there are (NVIDIA MIG User Guide, CUDA
    Device Enumeration).
    """
    if slices:
        return slices[:1]
    if value is not None and value.strip().startswith("MIG-"):
        raise UnusableGpu(f"CUDA_VISIBLE_DEVICES is {value!r}, and no MIG slice here begins so")
    raise UnusableGpu("MIG mode is on, and no slice is made; `nvidia-smi mig -cgi` makes one")


def _nothing_named(value: str | None, count: int) -> str:
    return (
        f"CUDA_VISIBLE_DEVICES is {value!r}, which names none of the {count} GPUs, or one twice; "
        f"legal: indexes 0 to {count - 1}, UUIDs of `nvidia-smi -L`, or empty for CPU ranks"
    )


def _mig_slices(nvml: ModuleType, handle: Any) -> list[NvmlDevice] | None:
    """Slices of a GPU; None where it is not split."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return None
        raise
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    found = []
    for index in range(most):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                continue  # slices need not be numbered without gaps
            raise
        found.append(_device(nvml, part, most))
    return found


def _device(nvml: ModuleType, handle: Any, slices: int = 0) -> NvmlDevice:
    """A GPU; of one that is split into up to `slices`, a slice."""
    name, uuid = (_text(ask(handle)) for ask in (nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID))
    usable, free = _memory(nvml, handle)
    if not slices:
        return NvmlDevice(name, uuid, usable, free)
    size = re.search(r"MIG (?:(\d+)c\.)?(\d+)g\.", name)
    if size is None:
        raise UnusableGpu(f"the MIG slice {name!r} does not say its size, as `MIG 1g.10gb` does")
    return NvmlDevice(name, uuid, usable, free, int(size[1] or size[2]) / slices)


def _memory(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    """(usable, free) bytes. Only version 2 of the answer tells the driver's own part apart."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.free)
    except nvml.NVMLError:  # an older driver; what is not permitted is refused again
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


if __name__ == "__main__":  # asked in a child process, which may hang where the driver does
    with suppress(NoGpu, UnusableGpu):
        visible_gpus()
