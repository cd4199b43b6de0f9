"""Counts of rows that the host needs: read behind the device's work, and once for a recomputed
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
CountReader = Callable[[Tensor, int], Callable[[], list[Any]]]
"""Starts reading counts on the device, whose last dim adds up to a total; the function that it
returns gives them as integers.

`start_reading` copies them, and waits only when they are asked for; a rehearsal, whose tensors have
no values, takes them to be `balanced_counts`.
"""


def start_reading(counts: Tensor, total: int) -> Callable[[], list[Any]]:
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


def balanced_counts(counts: Tensor, total: int) -> Callable[[], list[Any]]:
    """Counts as even as integers allow, in the shape of `counts`, whose values are not read."""
    size = counts.shape[-1]
    row = [total // size + (i < total % size) for i in range(size)]
    return lambda: row if counts.dim() == 1 else [list(row) for _ in range(counts.shape[0])]


_kept: ContextVar[list[Any] | None] = ContextVar("kept", default=None)
_repeated: ContextVar[list[Any] | None] = ContextVar("repeated", default=None)


def kept_for_recomputation(make: Callable[[], T]) -> T:
    """What `make` returns, or in the recomputation of a layer what it returned in forward, so that
    counts are exchanged and read once.
    """
    if (repeated := _repeated.get()) is not None:
        again: T = repeated.pop(0)
        return again
    made = make()
    if (kept := _kept.get()) is not None:
        kept.append(made)
    return made


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
