"""The CUDA caching allocator's own counters, and NVML's figure of what else is on the GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from workbench.engine.measure.memory_window import MemorySection, MemoryWindow, StepCounters
from workbench.machine.nvml_index import nvml_memory_used

if TYPE_CHECKING:
    from workbench.machine.nvml_index import MemoryUsed


class CudaMemoryMeter:
    """The CUDA caching allocator's counters; same words as `CpuMemoryMeter`. They follow the host,
    not the stream, and reading them waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # resetting the counters of an allocator that is not there raises
        self.device = device
        self._sections: list[MemorySection] = []
        self._peak = 0
        self._step_allocated = self._step_reserved = self._retries = 0

    def now(self) -> int | None:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    def start(self) -> None:
        """Begin a window."""
        self._sections, self._peak = [], 0
        self._restart()

    def mark(self, label: str) -> None:
        """Start a section of the window."""
        self._close()
        self._sections.append(MemorySection(label, torch.cuda.memory_allocated(self.device), 0))

    def stop(self) -> MemoryWindow:
        """End the window."""
        self._close()
        return MemoryWindow(self._peak, torch.cuda.memory_allocated(self.device), self._sections)

    def begin_step(self) -> None:
        """Reset the counters of a step."""
        self._close()
        self._step_allocated = self._step_reserved = 0
        self._retries = self._all_retries()

    def end_step(self, sampled: bool) -> StepCounters:
        """The counters since `begin_step`; NVML is asked only where the step is `sampled`."""
        self._close()
        used = _used_on(self.device) if sampled else None
        own = used.by_process if used else None
        held = torch.cuda.memory_reserved(self.device)
        return StepCounters(
            max_memory_allocated=self._step_allocated,
            max_memory_reserved=self._step_reserved,
            num_alloc_retries=self._all_retries() - self._retries,
            device_memory_used=used.by_all if used else None,
            process_memory_used=own,
            outside_allocator=None if own is None else max(0, own - held),
        )

    def _close(self) -> None:
        """Take the peaks since the last call into the section, the window and the step."""
        peak = torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, peak)
        self._step_allocated = max(self._step_allocated, peak)
        reserved = torch.cuda.max_memory_reserved(self.device)
        self._step_reserved = max(self._step_reserved, reserved)
        if self._sections:
            self._sections[-1].peak = max(self._sections[-1].peak, peak)
        torch.cuda.reset_peak_memory_stats(self.device)

    def _restart(self) -> None:
        """Forget the peaks from before a window, but not from the step that it begins in."""
        self._close()
        self._peak = 0

    def _all_retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def _used_on(device: torch.device) -> MemoryUsed | None:
    """NVML's figures, or None: its errors share no base class, and none may end a run."""
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return nvml_memory_used(uuid, os.getpid())
    except Exception:
        return None
