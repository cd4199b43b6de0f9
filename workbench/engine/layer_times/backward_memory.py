"""What the backward of each block needs while it runs, beside what blocks keep from forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from workbench.engine.layer_times.block_clock import BlockClock, DeviceClock
from workbench.engine.layer_times.block_trace import BlockTrace
from workbench.engine.layer_times.model_blocks import Block
from workbench.engine.measure.live_memory import LiveBytes


class PeakStamps(DeviceClock):
    """Stamps between which it knows the peak memory: the allocator's on CUDA, of live tensors on
    CPU, which does not see into compiled kernels.
    """

    def __init__(self, device: torch.device, persistent: Iterable[Tensor]) -> None:
        super().__init__(device)
        self.device, self.live = device, None if self.on_cuda else LiveBytes(device)
        if self.live:
            self.live.register(persistent, "parameters")
        self.base = self._now()
        """Bytes that are there before a pass."""
        self._peaks: list[int] = []
        self.stamp()  # from here on

    def _now(self) -> int:
        if self.live:
            return sum(self.live.current.values())
        return torch.cuda.memory_allocated(self.device)

    def stamp(self) -> int:
        """Now, as the number of stamps before."""
        if self.live:
            self._peaks.append(sum(self.live.peak.values()))
            self.live.restart()
        else:
            self._peaks.append(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        return len(self._peaks)

    def peak(self, begin: int, end: int) -> int:
        """Bytes between two stamps."""
        return max(self._peaks[begin:end], default=0)


def backward_bytes(
    blocks: Sequence[Block],
    trace: BlockTrace,
    forward: Callable[[], Tensor],
    persistent: Iterable[Tensor],
    device: torch.device,
    tied: Sequence[Mapping[int, int]],
) -> list[int]:
    """Bytes by block: the peak of its backward over what is there before a pass, and what the
    blocks up to it, in the order in which the model calls them, keep for backward.

    The gradient of a weight that two blocks share waits from the later one's backward to the
    earlier one's, to be summed. Both are of a stage that has both blocks, and are not counted.

    Args:
        blocks: Of the model.
        trace: Of a pass of theirs.
        forward: Of one microbatch, to the loss.
        persistent: Parameters and gradients.
        device: Where they are.
        tied: As of `block_parameters`, by place in the order of calls.
    """
    stamps, found = PeakStamps(device, persistent), [0] * len(blocks)
    kept = accumulate(trace.kept_bytes[i] for i in trace.order)
    held = (size + _of_ties(tied, place) for place, size in enumerate(kept))
    beside = dict(zip(trace.order, held))
    clock = BlockClock(blocks, stamps)
    with stamps.live or nullcontext(), clock.watching():
        _, spans = clock.spans(forward)
    for block, begin, end in spans:
        found[block] = max(found[block], stamps.peak(begin, end) - stamps.base - beside[block])
    return found


def _of_ties(tied: Sequence[Mapping[int, int]], place: int) -> int:
    """Bytes of gradients that wait for an earlier block's during the backward of the block at a
    place, and of their sums with its own.
    """
    waiting = [pair for later in tied[place + 1 :] for pair in later.items()]
    return sum(size * (1 + (before == place)) for before, size in waiting if before <= place)
