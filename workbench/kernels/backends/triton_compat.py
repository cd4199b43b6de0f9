"""Triton as an optional dependency.

Kernels import `jit`, `tl` and `triton` from here. Without Triton they are not compiled and must not
be launched; everything else works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover (the tests install it)
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "accumulation_type",
    "device_programs",
    "jit",
    "next_power_of_2",
    "runs_triton",
    "tl",
    "triton",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on the host, which it decides at import."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the plain function where Triton is missing."""
    return function if triton is None else triton.jit(function)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: on GPUs, and under Triton's interpreter."""
    return triton is not None and (device.type == "cuda" or INTERPRETED)


def accumulation_type(*tensors: Tensor) -> Any:
    """Triton type that a kernel accumulates in: fp64 if one of `tensors` is fp64, else fp32."""
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` and 1."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache
def device_programs(device: torch.device, per_processor: int = 1) -> int:
    """Programs that fill a device: `per_processor` per multiprocessor; 4 on the host."""
    if device.type != "cuda":
        return 4
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count
