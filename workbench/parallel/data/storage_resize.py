"""Freeing and filling a storage in place: the private part of torch that ZeRO-3 stands on."""

from __future__ import annotations

import torch
from torch import Tensor

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.parallel.data.storage_resize uses a private operator of torch 2.11 to 2.13, "
        f"not {torch.__version__}"
    )


def resize_storage(x: Tensor, nbytes: int) -> None:
    """Give the storage of `x` `nbytes`; tensors that look into it keep their shapes, and nothing
    may read them at 0.

    An operator, unlike `UntypedStorage.resize_`: whoever counts storages sees it.
    """
    torch.ops.inductor.resize_storage_bytes_(x, nbytes)
