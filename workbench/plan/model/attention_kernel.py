"""Which attention kernels a plan's GPU has for its precision and head size."""

from __future__ import annotations

from typing import get_args

from workbench.machine.hardware import GPU
from workbench.plan.model.head_split import num_kv_heads
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import STORED, FrameworkAttention

FLASH_DTYPES = ("bf16", "fp16")
WIDEST = 256
"""Entries of a head beyond which there is no flash kernel."""
ALIGNED_BYTES = 16
"""Both fused CUDA kernels load a multiple of so many bytes of a head."""


def attention_kernels(gpu: GPU, precision: str, head_dim: int) -> tuple[str, ...]:
    """Kernels that run, best first.

    On CUDA, flash attention takes 16 bits and compute capability 8.0 on, the first that has bf16
    (`sdp_utils.cpp` of torch 2.11 to 2.13). CPU ranks have one fused kernel for every dtype.
    """
    if gpu.device == "cpu":
        return ("flash", "math")
    sixteen = STORED.get(precision, precision) in FLASH_DTYPES
    flash = sixteen and "bf16" in gpu.tflops and head_dim <= WIDEST
    efficient = is_aligned(precision, head_dim)
    return (*(("flash",) if flash else ()), *(("efficient",) if efficient else ()), "math")


def kernels_of_shape(
    gpu: GPU, precision: str, shape: Shape, length: int, documents: bool = False
) -> tuple[str, ...]:
    """The same for attention of `shape` over `length` tokens, to a token's own document alone where
    `documents`.

    Of torch's fused kernels only the CPU's is given the mask of a window, of documents or of
    ALiBi's biases, and none knows soft-caps: what they lack, blockwise attention computes by plain
    operators.
    """
    if not (documents or shape.changes_scores(length)):
        return attention_kernels(gpu, precision, shape.query_dim)
    masked = gpu.device == "cpu" and shape.attention_softcap is None
    return (*(("flash",) if masked else ()), "blockwise", "math")


def framework_attention(gpu: GPU) -> tuple[str, ...]:
    """Attention that other frameworks run on `gpu`: `flash` and `efficient` are those of torch's
    `scaled_dot_product_attention`.

    Flash and cuDNN kernels take compute capability 8.0 on, the first that has bf16 (2307.08691).
    """
    everywhere = ("unfused", "efficient")
    fused = ("flash", *(k for k in get_args(FrameworkAttention) if k not in everywhere))
    return (*everywhere, *(fused if "bf16" in gpu.tflops else ()))


def is_aligned(precision: str, head_dim: int) -> bool:
    """Whether CUDA's fused kernels take heads as they are."""
    sixteen = STORED.get(precision, precision) in FLASH_DTYPES
    return head_dim * (2 if sixteen else 4) % ALIGNED_BYTES == 0


def decided_attention(
    gpu: GPU, precision: str, shape: Shape, length: int, documents: bool = False
) -> str:
    """What `auto` is."""
    return kernels_of_shape(gpu, precision, shape, length, documents)[0]


def repeats_heads(attention: str, shape: Shape) -> bool:
    """Whether key-value heads are repeated, one for every query head, before attention: torch's
    kernels but flash need that in 2.11 to 2.13.
    """
    return attention in ("efficient", "math") and num_kv_heads(shape) != shape.heads
