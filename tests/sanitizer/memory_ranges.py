"""Which bytes of which storage a tensor covers, and whether two tensors share any."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MemoryRange:
    """The bytes of a storage that a tensor covers; it keeps neither of them alive.

    Attributes:
        storage: Address of the storage, which is its own as long as it lives.
        start: First byte.
        stop: One past the last byte.
        shape: The tensor's.
        strides: The tensor's, in elements.
        itemsize: Bytes of an element.
        death: Calls back when the storage is freed; None if nobody asked.
    """

    storage: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    death: weakref.ref[torch.UntypedStorage] | None = None

    @classmethod
    def of(cls, x: Tensor, on_death: Callable[[object], None] | None = None) -> MemoryRange:
        """Of a tensor; `on_death` is called when its storage is freed."""
        storage, start = x.untyped_storage(), x.storage_offset() * x.itemsize
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        return cls(
            storage._cdata,
            start,
            start + (last + 1) * x.itemsize if x.numel() else start,
            tuple(x.shape),
            x.stride(),
            x.itemsize,
            weakref.ref(storage, on_death) if on_death else None,
        )

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether a byte is in both: exactly, for strided tensors too."""
        if self.storage != other.storage:
            return False
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if self._is_dense and other._is_dense:
            return True
        first, last = min(self.start, other.start), max(self.stop, other.stop)
        return bool((self._mask(first, last) & other._mask(first, last)).any())

    @property
    def _is_dense(self) -> bool:
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size == self.stop - self.start

    def _mask(self, first: int, last: int) -> Tensor:
        """True at each covered byte of [first, last)."""
        mask = torch.zeros(last - first, dtype=torch.bool)
        strides = [stride * self.itemsize for stride in self.strides]
        covered = mask.as_strided((*self.shape, self.itemsize), (*strides, 1), self.start - first)
        covered.fill_(True)
        return mask
