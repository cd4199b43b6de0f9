"""Triton, which is optional, and where its kernels run.

Rooms above import `jit`, `tl` and `triton` from here. Without Triton the kernels are not compiled
and nothing may start them; all else of this room works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover (the tests install it)
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels on the host, operation by operation; it decides that at import."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the plain function where Triton is missing."""
    return function if triton is None else triton.jit(function)


def runs_triton(device: torch.device) -> bool:
    """Whether tensors on `device` are given to Triton kernels: on a GPU, and where kernels are
    interpreted.
    """
    return triton is not None and (device.type == "cuda" or INTERPRETED)


def wide(*tensors: Tensor) -> Any:
    """What a kernel computes in: fp64 where one of `tensors` has it, else fp32."""
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than `n`, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def programs(device: torch.device, per_processor: int = 1) -> int:
    """How many programs fill a device: `per_processor` times its multiprocessors; a handful where
    it has none.
    """
    if device.type != "cuda":
        return 4
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count
