"""Inputs of recomputed layers in host memory (ZeRO-Infinity, 2104.07857, section 5.1.2).

A layer's input is copied down while the next layer computes forward, and comes back while the layer
behind it computes backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from workbench.copy_stream import CopyStream
from workbench.parallel.async_collectives import WaitFn
from workbench.parallel.data.offload.host_arena import host_zeros


class _Offloaded:
    """A saved tensor in host memory; its buffer goes back to the pool with it."""

    def __init__(self, pool: ActivationOffload, x: Tensor) -> None:
        self._pool, self._device, self._shape = pool, x.device, x.shape
        self._buffer = pool.take(x)
        self._copy: tuple[Tensor, WaitFn] | None = None
        """The tensor on its way back."""
        self.before: weakref.ref[_Offloaded] | None = None
        """What was saved before it, and is needed after it."""
        with pool.copies.copying():
            self._buffer.copy_(x.reshape(-1), non_blocking=True)
            self.copied = pool.copies.copied()

    def start_copy_back(self) -> None:
        """Start to copy the tensor to the device, unless that is under way."""
        if self._copy is not None:
            return
        x = torch.empty(self._shape, dtype=self._buffer.dtype, device=self._device)
        with self._pool.copies.copying():
            x.view(-1).copy_(self._buffer, non_blocking=True)
            self._copy = x, self._pool.copies.copied()

    def restored(self) -> Tensor:
        """The tensor on the device; the copy of the one before it is started."""
        self.start_copy_back()
        assert self._copy is not None
        (x, wait), self._copy = self._copy, None
        if self.before is not None and (before := self.before()) is not None:
            before.start_copy_back()
        wait()
        return x

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)


def _ignore(buffer: Tensor) -> None:
    """Nobody counts memory."""


class ActivationOffload:
    """Keeps what layers save in host memory, in buffers that are used again.

    Args:
        copies: The stream of copies.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self.buffers: list[Tensor] = []
        """Of the host, all there are."""
        self._free: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._allocated: Callable[[Tensor], None] = _ignore
        self._last: weakref.ref[_Offloaded] | None = None
        self._leaving: tuple[Tensor, WaitFn] | None = None
        """What is on its way to the host, and lives until it has arrived."""

    @contextmanager
    def watched(self, allocated: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside, `allocated` is called with every new buffer: those of the first step come as they
        are needed.
        """
        self._allocated = allocated
        try:
            yield
        finally:
            self._allocated = _ignore

    def saving(self) -> AbstractContextManager[None]:
        """Inside, tensors saved for backward are kept in host memory."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, _Offloaded.restored
        )
        return hooks

    def start_forward(self, *_: object) -> None:
        """What is saved from here on belongs to another microbatch."""
        self._last = None

    def end_forward(self, *_: object) -> None:
        """Let the device wait until the last layer's input has left."""
        if self._leaving is not None:
            wait, self._leaving = self._leaving[1], None
            wait()

    def _pack(self, x: Tensor) -> _Offloaded:
        self.end_forward()
        kept = _Offloaded(self, x)
        kept.before, self._last = self._last, weakref.ref(kept)
        self._leaving = x, kept.copied
        return kept

    def take(self, like: Tensor) -> Tensor:
        """A buffer [numel] for a tensor."""
        free = self._free[like.numel(), like.dtype]
        if not free:
            free.append(host_zeros(like.numel(), like.dtype, like.device))
            self.buffers += free
            self._allocated(free[0])
        return free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """Let another tensor use a buffer."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)
