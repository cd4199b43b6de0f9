"""Tensors between canaries: an interpreted kernel that writes outside its output would corrupt the
heap unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ROOM = 64
"""Entries on each side."""


@contextmanager
def canaries() -> Iterator[list[Tensor]]:
    """Inside, whatever `torch.empty`, `torch.empty_like` and `Tensor.new_empty` make lies between
    canaries, and starts as canaries too, so that what no kernel wrote is seen; at the end all that
    lies outside must be as it was.
    """
    buffers: list[Tensor] = []
    plain = torch.empty

    def empty(
        *size: Any, dtype: torch.dtype | None = None, device: Any = None, **other: Any
    ) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = plain(shape.numel() + 2 * ROOM, dtype=dtype, device=device, **other)
        buffer.fill_(_canary(buffer.dtype))
        buffers.append(buffer)
        return buffer[ROOM : ROOM + shape.numel()].view(shape)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None, **other: Any) -> Tensor:
        return empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def new_empty(x: Tensor, *size: Any, dtype: torch.dtype | None = None, **other: Any) -> Tensor:
        return empty(*size, dtype=dtype or x.dtype, device=x.device)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield buffers
    for buffer in buffers:
        for side in (buffer[:ROOM], buffer[-ROOM:]):
            assert torch.equal(side, torch.full_like(side, _canary(buffer.dtype))), (
                f"written outside {buffer.shape}"
            )


def _canary(dtype: torch.dtype) -> float | int:
    return -7777.0 if dtype.is_floating_point else 77
