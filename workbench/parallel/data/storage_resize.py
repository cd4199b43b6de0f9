"""Tensors without storage, and resizing of storages in place: the private torch operators that
ZeRO-3 needs (FSDP2 resizes with the same).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.parallel.data.storage_resize uses private operators of torch 2.11 to 2.13, "
        f"not {torch.__version__}"
    )


def resize_storage(x: Tensor, nbytes: int) -> None:
    """Resize the storage of `x` to `nbytes`, 0 to free it.

    Views keep their shapes; nothing may read them while the storage is freed. Unlike
    `UntypedStorage.resize_` this is an operator, so that a dispatch mode that accounts for memory
    sees it.
    """
    torch.ops.inductor.resize_storage_bytes_(x, nbytes)


def without_storage(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor of `numel` elements whose storage is empty, for `resize_storage` to allocate."""
    return view_without_storage(torch.empty(0, dtype=dtype, device=device), 0, (numel,))


def view_without_storage(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """The view of `shape` that begins at element `start` of a tensor whose storage is empty.

    torch's public views would refuse: they check that the storage is large enough.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    view: Tensor = torch.ops.inductor._reinterpret_tensor(flat, list(shape), strides, start)
    return view
