"""Measured memory: bytes allocated as torch's allocator reports them, independent of `LiveBytes`.

CUDA's caching allocator keeps these statistics. The CPU allocator does not: there the profiler
reports every allocation and free, and their running sum is the memory. Only memory events and marks
are recorded, no operators: a window costs nothing while it runs and about 4 us per event at its
end.

The profiler does not see threads that torch did not start from the measured one (a process
group's), frees of blocks allocated before the first window, and memory that bypasses torch's
allocator (NumPy's, a library's scratch buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)
from torch.profiler import record_function

if TYPE_CHECKING:
    from collections.abc import Callable

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.engine.measure.allocator_memory reads torch's private profiler of 2.11 to "
        f"2.13, not {torch.__version__}"
    )

PREFIX = "workbench.allocator:"


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
    reserved: int | None = None
    """CUDA: peak bytes reserved by the caching allocator."""
    device_used: int | None = None
    """CUDA: bytes in use on the device by all processes, as NVML reports them at the end."""

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


def memory_meter(device: torch.device) -> CpuMemoryMeter | CudaMemoryMeter:
    """The memory meter of a device.

    Raises:
        ValueError: The device's allocator cannot be read.
    """
    if device.type == "cuda":
        return CudaMemoryMeter(device)
    if device.type == "cpu":
        return CpuMemoryMeter()
    raise ValueError(
        f"cluster.gpu: memory of a {device.type} device cannot be measured, only of cpu and cuda"
    )


class CpuMemoryMeter:
    """Running sum of the CPU allocator's events.

    Bytes are absolute if the first window starts before anything is allocated. A later window
    starts at an unknown level: it is aligned with the first at its first mark of a label that the
    first also had. So mark the same moment of every step, such as its start, and let the first
    window reach a step in which all persistent state exists. One window at a time in a process, and
    no other torch profiler beside it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._known: dict[str, int] = {}
        self._level = 0

    def now(self) -> int | None:
        """None: on CPU, bytes are known only after a window."""
        return None

    def start(self) -> None:
        """Start a window."""
        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), ""
        )  # shapes, memory, stacks, flops, modules
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]

    def mark(self, label: str) -> None:
        """Start a section of the window."""
        with record_function(PREFIX + label):
            pass

    def stop(self) -> MemoryWindow:
        """End the window and sum its events."""
        window = self._sum(
            sorted(
                _events(_disable_profiler().experimental_event_tree()), key=lambda event: event[0]
            )
        )
        tied = [section for section in window.sections if section.label in self._known]
        if tied:
            _shift(window, self._known[tied[0].label] - tied[0].start)
        else:
            self._known |= {section.label: section.start for section in window.sections}
        self._level = window.end
        return window

    def _sum(self, events: list[tuple[int, str | None, int, int]]) -> MemoryWindow:
        window = MemoryWindow(self._level, self._level)
        level = self._level
        for _, label, address, size in events:
            if label is not None:
                window.sections.append(MemorySection(label, level, level))
                continue
            # An address that is allocated again was freed on a thread that the profiler does not
            # see; a free without allocation is of a block from before the first window.
            level -= self._blocks.pop(address, 0)
            if size > 0:
                self._blocks[address] = size
                level += size
            window.peak = max(window.peak, level)
            if window.sections:
                window.sections[-1].peak = max(window.sections[-1].peak, level)
        window.end = level
        return window


def _events(tree: Iterable[Any]) -> Iterator[tuple[int, str | None, int, int]]:
    """(time, label of a mark, address, bytes) of every mark and memory event; a free has negative
    bytes.
    """
    for event in tree:
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, None, event.extra_fields.ptr, event.extra_fields.alloc_size
        elif event.name.startswith(PREFIX):
            yield event.start_time_ns, event.name.removeprefix(PREFIX), 0, 0
        yield from _events(event.children)


def _shift(window: MemoryWindow, by: int) -> None:
    window.peak += by
    window.end += by
    for section in window.sections:
        section.start += by
        section.peak += by


class CudaMemoryMeter:
    """The CUDA caching allocator's own counters; same words as `CpuMemoryMeter`. They follow the
    host, not the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sections: list[MemorySection] = []
        self._peak = 0

    def now(self) -> int | None:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    def start(self) -> None:
        """Begin a window; resets the allocator's peaks."""
        self._sections, self._peak = [], 0
        torch.cuda.reset_peak_memory_stats(self.device)
        self._reserved = 0

    def mark(self, label: str) -> None:
        """Start a section of the window."""
        self._close()
        self._sections.append(MemorySection(label, torch.cuda.memory_allocated(self.device), 0))

    def _close(self) -> None:
        """Take the peaks since the last mark into the section and the window."""
        peak = torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, peak)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
        if self._sections:
            self._sections[-1].peak = peak
        torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> MemoryWindow:
        """End the window."""
        self._close()
        now = torch.cuda.memory_allocated(self.device)
        return MemoryWindow(
            self._peak,
            now,
            self._sections,
            self._reserved,
            _nvml(torch.cuda.device_memory_used, self.device),
        )


def _nvml(read: Callable[[torch.device], int], device: torch.device) -> int | None:
    """NVML's figure, or None: its errors share no base class, and none may end a run."""
    try:
        return read(device)
    except Exception:
        return None
