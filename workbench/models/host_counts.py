"""Counts of rows that the host needs: read behind the device's work. A recomputed layer takes those
of its forward, and its choices of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class CountReader(Protocol):
    """Starts reading counts of rows on the device; the function that it returns gives them as
    integers.

    `start_reading` copies them, and waits only when they are asked for; a rehearsal, whose tensors
    have no values, takes them to be `balanced_counts`.
    """

    def __call__(
        self, counts: Tensor, total: int, index: int = 0, ranks: int = 1
    ) -> Callable[[], list[Any]]:
        """Start reading.

        Args:
            counts: Rows of each expert [E], which add up to `total`; or those sent to each expert
                and those received, by source rank and local expert, [2, E].
            total: Rows of this rank.
            index: This rank's among those that exchange rows.
            ranks: How many those are.
        """
        ...


def start_reading(
    counts: Tensor, total: int, index: int = 0, ranks: int = 1
) -> Callable[[], list[Any]]:
    """Start to copy counts to pinned memory; what is returned waits for that copy alone."""
    if not counts.is_cuda:
        return counts.tolist
    host = torch.empty_like(counts, device="cpu", pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[Any]:
        copied.synchronize()
        values: list[Any] = host.tolist()
        return values

    return wait


def balanced_counts(
    counts: Tensor, total: int, index: int = 0, ranks: int = 1
) -> Callable[[], list[Any]]:
    """Counts as even as integers allow, in the shape of `counts`, whose values are not read: the
    same on every rank, so that each receives what all send to it.
    """
    size = counts.shape[-1]
    row = [total // size + (i < total % size) for i in range(size)]
    if counts.dim() == 1:
        return lambda: row
    local = size // ranks
    received = row[index * local : (index + 1) * local] * ranks
    return lambda: [row, received]


_kept: ContextVar[list[Any] | None] = ContextVar("kept", default=None)
_repeated: ContextVar[list[Any] | None] = ContextVar("repeated", default=None)


def kept_for_recomputation(make: Callable[[], T]) -> T:
    """What `make` returns, or in the recomputation of a layer what it returned in forward: counts
    are exchanged and read once, and go with the choices that they count.
    """
    if (repeated := _repeated.get()) is not None:
        again: T = repeated.pop(0)
        return again
    made = make()
    if (kept := _kept.get()) is not None:
        kept.append(made)
    return made


def is_recomputing() -> bool:
    """Whether a checkpointed layer or attention is being recomputed."""
    return _repeated.get() is not None


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpointed forward and of its recomputation, for `torch.utils.checkpoint`."""
    values: list[Any] = []
    return _holding(_kept, values), _holding(_repeated, values)


@contextmanager
def _holding(variable: ContextVar[list[Any] | None], values: list[Any]) -> Iterator[None]:
    token = variable.set(values)
    try:
        yield
    finally:
        variable.reset(token)
