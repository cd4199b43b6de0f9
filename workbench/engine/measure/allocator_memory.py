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
from typing import Any

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

from workbench.engine.measure.cuda_memory import CudaMemoryMeter
from workbench.engine.measure.memory_window import (
    MemoryMeter,
    MemorySection,
    MemoryWindow,
    StepCounters,
)

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.engine.measure.allocator_memory reads torch's private profiler of 2.11 to "
        f"2.13, not {torch.__version__}"
    )

PREFIX = "workbench.allocator:"


def memory_meter(device: torch.device) -> MemoryMeter:
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

    def begin_step(self) -> None:
        """Nothing: the CPU allocator counts nothing by itself."""

    def end_step(self, sampled: bool) -> StepCounters:
        """No counters."""
        return StepCounters()

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
