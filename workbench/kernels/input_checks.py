"""What an operator asks of its tensors before any pointer is handed on; what is not right is
refused by name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

INTEGERS = ("targets", "rows", "values")
"""Names of what holds whole numbers; what those may be, operators check themselves."""
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(operator: str, like: str, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming tensor, value and what would be legal, unless all that are there are
    on the device of the one called `like`, without tangents and, but for `INTEGERS`, in a dtype
    that the kernels know.
    """
    first = tensors[like]
    assert first is not None
    for name, x in tensors.items():
        if x is None:
            continue
        if x.device != first.device:
            raise ValueError(
                f"{operator}: {name} is on {x.device}, but {like} on {first.device}; legal: one "
                f"device"
            )
        if x.dtype not in FLOATING and name not in INTEGERS:
            legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
            raise ValueError(
                f"{operator}: {name} is {str(x.dtype).removeprefix('torch.')}; legal: {legal}"
            )
        if unpack_dual(x).tangent is not None:  # which torch's custom operators drop without a word
            raise ValueError(
                f"{operator}: {name} has a tangent of forward-mode autograd; legal: backward"
            )


def check_shape(operator: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `x`, where it is there, has `shape`."""
    if x is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}; legal: {tuple(shape)}")


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., D] as contiguous rows [N, D]; copied where it is not."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def wide_dtype(x: Tensor) -> torch.dtype:
    """What statistics of `x` are kept in: fp32, or fp64 where x has it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
