"""What a memory meter measures between its start and its stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from workbench.vocabulary import MEMORY_COUNTERS


@dataclass
class MemorySection:
    """From one mark to the next: bytes allocated at the mark, and the peak until the next one."""

    label: str
    start: int
    peak: int


@dataclass
class MemoryWindow:
    """Bytes allocated between `start()` and `stop()`; one section per mark, in order."""

    peak: int
    end: int
    sections: list[MemorySection] = field(default_factory=list)

    def at(self, label: str) -> int:
        """Bytes allocated at the last mark of that label.

        Raises:
            KeyError: There is no such mark.
        """
        return self._last(label).start

    def peak_of(self, label: str) -> int:
        """Peak bytes from the last mark of that label to the next mark."""
        return self._last(label).peak

    def _last(self, label: str) -> MemorySection:
        for section in reversed(self.sections):
            if section.label == label:
                return section
        raise KeyError(label)


@dataclass(frozen=True)
class StepCounters:
    """Counters of a device's memory for one step, in torch's words; None where nothing counts it.

    The allocator's follow the host: they are those of the step that it has enqueued.
    """

    max_memory_allocated: int | None = None
    """Peak bytes handed out by the caching allocator in this step."""
    max_memory_reserved: int | None = None
    """Peak bytes that it held in this step."""
    num_alloc_retries: int | None = None
    """Allocations of this step that succeeded only after unused blocks were given back."""
    device_memory_used: int | None = None
    """Bytes in use on the device, by all processes, as NVML reports them; of sampled steps."""
    process_memory_used: int | None = None
    """Bytes in use on the device by this process, as NVML reports them; of sampled steps."""
    outside_allocator: int | None = None
    """`process_memory_used` less what the allocator held when NVML was asked."""

    def of_step(self) -> dict[str, int | None]:
        """The counters that a step's telemetry record has."""
        return {name: getattr(self, name) for name in MEMORY_COUNTERS}


class MemoryMeter(Protocol):
    """Measures allocated memory in windows, and counters of each step."""

    def now(self) -> int | None:
        """Bytes allocated now; None where they are known only after a window."""
        ...

    def start(self) -> None:
        """Start a window."""
        ...

    def mark(self, label: str) -> None:
        """Start a section of the window."""
        ...

    def stop(self) -> MemoryWindow:
        """End the window."""
        ...

    def begin_step(self) -> None:
        """Reset the counters of a step."""
        ...

    def end_step(self, sampled: bool) -> StepCounters:
        """The counters since `begin_step`; NVML is asked only where the step is `sampled`."""
        ...
