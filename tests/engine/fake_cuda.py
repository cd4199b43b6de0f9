"""torch.cuda's memory counters and events without a GPU: what a test sets, and a clock of its
own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.engine.measure import cuda_memory
from workbench.machine.nvml_index import MemoryUsed


class FakeAllocator:
    """A caching allocator that keeps what it reserved; a peak is that since its reset."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.retries = 0
        self.peaks = [0, 0]
        self.used: MemoryUsed | None = MemoryUsed(0, None)
        self.nvml_calls = 0

    def allocate(self, size: int) -> None:
        """Allocate, or free a negative size."""
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peaks = [max(self.peaks[0], self.allocated), max(self.peaks[1], self.reserved)]

    def reset(self, device: object) -> None:
        """What `reset_peak_memory_stats` does."""
        self.peaks = [self.allocated, self.reserved]

    def nvml(self, uuid: str, pid: int) -> MemoryUsed:
        """What NVML says."""
        self.nvml_calls += 1
        if self.used is None:
            raise RuntimeError("NVML: no permission")
        return self.used

    def install(self, patch: pytest.MonkeyPatch) -> FakeAllocator:
        """Put it in place of torch.cuda's functions and of NVML's."""
        functions: dict[str, Any] = {
            "init": lambda: None,
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peaks[0],
            "max_memory_reserved": lambda device: self.peaks[1],
            "reset_peak_memory_stats": self.reset,
            "memory_stats": lambda device: {"num_alloc_retries": self.retries},
            "get_device_properties": lambda device: type("Properties", (), {"uuid": "0"}),
        }
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(cuda_memory, "nvml_memory_used", self.nvml)
        return self


class FakeStream:
    """A stream on which enqueued work takes time, and the host none; events read its clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.synchronized = 0

    def run(self, seconds: float) -> None:
        """Enqueue work, or a wait, of that length."""
        self.seconds += seconds

    def install(self, patch: pytest.MonkeyPatch) -> FakeStream:
        """Put it in place of torch.cuda's events."""
        stream = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stream.seconds

            def elapsed_time(self, end: Event) -> float:
                assert stream.synchronized, "events are read before the stream has got there"
                return (end.at - self.at) * 1e3

        def synchronize(device: object = None) -> None:
            self.synchronized += 1

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        return self
