"""Resize a tensor's storage in place: the private torch operator that ZeRO-3 needs (as FSDP2
does).
"""

from __future__ import annotations

import torch
from torch import Tensor

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.parallel.data.storage_resize uses a private operator of torch 2.11 to 2.13, "
        f"not {torch.__version__}"
    )


def resize_storage(x: Tensor, nbytes: int) -> None:
    """Resize the storage of `x` to `nbytes`, 0 to free it.

    Views keep their shapes; nothing may read them while the storage is freed. Unlike
    `UntypedStorage.resize_` this is an operator, so that a dispatch mode that accounts for memory
    sees it.
    """
    torch.ops.inductor.resize_storage_bytes_(x, nbytes)
