"""The plan's device, as tensors of a run and of a rehearsal have it.

A rehearsal on CPU is of the GPU's code: its fake tensors are on `cpu:0` where the plan's are on a
GPU, and on `cpu` where they are in host memory. Fake tensors keep the two apart, as CUDA would, and
operators refuse to mix them; real tensors never have `cpu:0`. Code that differs by device asks
`on_gpu`, and `is_cuda` only before a call of the CUDA runtime itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")
REHEARSED_GPU = torch.device("cpu", 0)
"""The planned GPU's device in a rehearsal."""


def rehearsed_device(device_type: str) -> torch.device:
    """The device of a rehearsal's fake tensors for a plan's `cluster.gpu` of this type."""
    return REHEARSED_GPU if device_type == "cuda" else HOST


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or on the planned one in a rehearsal."""
    return is_gpu(x.device)


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or the planned one in a rehearsal."""
    return device.type == "cuda" or device == REHEARSED_GPU


def tensor_device(device: torch.device) -> torch.device:
    """`device` as real tensors name it: without an index on CPU, where Accelerate gives ranks
    one.
    """
    return HOST if device.type == "cpu" else device
