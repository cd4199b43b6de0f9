"""Input validation of the custom operators, before any pointer reaches a kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

INTEGER_TENSORS = ("targets", "rows", "values")
"""Names of integer tensors, whose dtype operators check themselves."""
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(operator: str, like: str, **tensors: Tensor | None) -> None:
    """Check devices and dtypes of an operator's tensors, and that none has a tangent.

    Args:
        operator: The operator, for messages.
        like: Name of the tensor whose device all others must have.
        **tensors: Name -> tensor; None is skipped.

    Raises:
        ValueError: Names tensor, value and what is legal.
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
        if x.dtype not in FLOAT_DTYPES and name not in INTEGER_TENSORS:
            legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
            raise ValueError(
                f"{operator}: {name} is {str(x.dtype).removeprefix('torch.')}; legal: {legal}"
            )
        if unpack_dual(x).tangent is not None:  # which torch's custom operators drop without a word
            raise ValueError(
                f"{operator}: {name} has a tangent of forward-mode autograd; legal: backward"
            )


def check_shape(operator: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `x` is None or has `shape`."""
    if x is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{operator}: {name} has shape {tuple(x.shape)}; legal: {tuple(shape)}")


def flatten_rows(x: Tensor) -> Tensor:
    """`x` [..., D] as contiguous rows [N, D]; copied if it is not contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor like `x`; `x.new_empty(x.shape)` takes twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Dtype of statistics of `x`: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
