"""Seconds of each block in forward and backward of one real pass, from hooks.

Of the forward all is some block's: what runs between two blocks belongs to the one that ended, what
runs before the first to the first. A block of which a pass has several calls is summed.

The backward of a call has ended when the gradients of its inputs are there: each input is replaced
by a view of its own, so that two readers of one tensor are distinguished. What autograd ran since
the call before that ended is this call's. A call that reads no activations (an embedding) has ended
with the backward of its last operator, and has what is left over if it was last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.engine.layer_times.model_blocks import Block
from workbench.engine.layer_times.tensors_within import tensors_within, with_tensors

Stamp = Any
"""Seconds of the host's clock, or a CUDA event."""


class Span(NamedTuple):
    """A part of a pass."""

    block: int
    begin: Stamp
    end: Stamp


class DeviceClock:
    """Stamps in the order of the device's work: the host's clock on CPU, events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        """Now, of what has been given to the device."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has come to every stamp."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Between two stamps, after a `wait`."""
        return float(begin.elapsed_time(end)) / 1e3 if self.on_cuda else float(end - begin)


class BlockClock:
    """Hooks on `blocks` that stamp the passes run within `watching`."""

    def __init__(self, blocks: Sequence[Block], clock: DeviceClock) -> None:
        self.blocks, self.clock = blocks, clock
        self._running: list[int] = []
        """Blocks under way, innermost last."""
        self._marks: list[tuple[int, Stamp]] = []
        """Block -> since when forward runs it."""
        self._ends: dict[int, tuple[int, Stamp]] = {}
        """Call -> (block, when its backward ended), in that order."""
        self._in_forward = False
        self._calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks in place."""
        handles = [
            handle
            for index, block in enumerate(self.blocks)
            for module in block.modules
            for handle in self._hook(index, module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True),
            module.register_forward_hook(partial(self._leave, index), with_kwargs=True),
        ]

    def times(self, forward: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
        """Seconds of (forward, backward) of each block in one pass; `forward` returns the loss."""
        found = [0.0] * len(self.blocks), [0.0] * len(self.blocks)
        for sums, spans in zip(found, self.spans(forward)):
            for block, begin, end in spans:
                sums[block] += self.clock.seconds(begin, end)
        return found

    def spans(self, forward: Callable[[], Tensor]) -> tuple[list[Span], list[Span]]:
        """Parts of one pass, (forward, backward), each in its order; `forward` returns the loss."""
        self._running, self._marks, self._ends, self._calls = [], [], {}, 0
        begin = self.clock.stamp()
        self._in_forward = True
        try:
            loss = forward()
        finally:
            self._in_forward = False
        turn = self.clock.stamp()
        loss.backward()
        end = self.clock.stamp()
        self.clock.wait()
        return self._forward(begin, turn), self._backward(turn, end)

    def _forward(self, begin: Stamp, end: Stamp) -> list[Span]:
        since = [begin, *(stamp for _, stamp in self._marks[1:]), end]
        return [
            Span(block, start, stop)
            for (block, _), start, stop in zip(self._marks, since, since[1:])
        ]

    def _backward(self, begin: Stamp, end: Stamp) -> list[Span]:
        blocks, stamps = zip(*self._ends.values())
        since = [begin, *stamps[:-1], end]
        return [Span(*each) for each in zip(blocks, since, since[1:])]

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._in_forward:  # recomputed by activation checkpointing
            return None
        self._running.append(index)
        self._marks.append((index, self.clock.stamp()))
        call, self._calls = self._calls, self._calls + 1
        return with_tensors((args, kwargs), partial(self._watched, call, index))

    def _leave(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._running.pop()
        if self._running:
            self._marks.append((self._running[-1], self.clock.stamp()))
        if not any(x.requires_grad for x in tensors_within((args, kwargs))):
            for x in tensors_within(output):
                if x.grad_fn is not None:
                    x.grad_fn.register_hook(partial(self._ended, self._calls, index))
            self._calls += 1

    def _watched(self, call: int, index: int, x: Tensor) -> Tensor:
        """A view of an input, whose gradient ends the call."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        view = x.view_as(x)
        view.register_hook(partial(self._ended, call, index))
        return view

    def _ended(self, call: int, index: int, *_: Any) -> None:
        self._ends.pop(call, None)
        self._ends[call] = index, self.clock.stamp()
