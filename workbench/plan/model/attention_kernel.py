"""Which fused attention a plan's GPU has for its dtype."""

from __future__ import annotations

from workbench.machine.hardware import GPU
from workbench.plan.model.head_split import num_kv_heads
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import STORED

FLASH_DTYPES = ("bf16", "fp16")
WIDEST = 256
"""Entries of a head beyond which there is no flash kernel."""


def repeats_heads(gpu: GPU, precision: str, shape: Shape) -> bool:
    """Whether key-value heads are repeated, one for every query head, before fused attention.

    On CUDA, flash attention takes fewer key-value heads than query heads, in 16 bits and from
    compute capability 8.0 on, the first that has bf16. What takes the rest, the memory-efficient
    operator, refuses them in torch 2.11 to 2.13, which leaves plain operators that keep scores [B,
    H, T, T] for backward.
    """
    if gpu.device != "cuda" or num_kv_heads(shape) == shape.heads:
        return False
    sixteen = STORED.get(precision, precision) in FLASH_DTYPES and "bf16" in gpu.tflops
    return not sixteen or int(shape.head_dim or 0) > WIDEST
