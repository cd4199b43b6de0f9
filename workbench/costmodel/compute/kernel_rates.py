"""Seconds of one kernel by the roofline: the longer of its FLOPs over the reachable FLOP/s and its
bytes over the reachable bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Mask, Number
from workbench.costmodel.rates.constants import Constants
from workbench.machine.hardware import GPU
from workbench.plan.schema import NARROW

NARROW_HEAD_DIM = 100
"""Head dims below this do not fill the tiles of fused attention."""
ALIGNMENT_BYTES = 16
"""GEMMs whose dims are multiples of this load whole vectors."""


@dataclass(frozen=True)
class DeviceRates:
    """Best rates that a kernel can reach on one GPU."""

    flops: float
    """FLOP/s of layer GEMMs at the plan's precision."""
    flops_16bit: float
    """FLOP/s of attention and head, which stay in 16 bits where layer GEMMs are narrower."""
    narrow_flops: float
    """FLOP/s of GEMMs in 8 bits or fewer that `narrow_share` is a share of."""
    bandwidth: float
    """Reachable memory bandwidth, bytes/s."""
    constants: Constants
    host_runs_ahead: bool
    """Whether launches are asynchronous, so that they hide behind compute."""


def peak_flops(gpu: GPU, precision: str) -> float:
    """Peak dense FLOP/s of a GPU at a precision; a dtype that its datasheet does not list runs as
    fp32.
    """
    return gpu.tflops.get(precision, gpu.tflops.get("fp32", max(gpu.tflops.values()))) * 1e12


def device_rates(gpu: GPU, precision: str, constants: Constants) -> DeviceRates:
    """Reachable rates of a GPU at a precision."""
    dense = peak_flops(gpu, precision)
    wide = (
        1e12 * gpu.tflops.get("bf16", gpu.tflops.get("fp16", dense / 1e12))
        if precision in NARROW
        else dense
    )
    # Over 8 bits with one scale for a tensor, which benchmarks of GPUs measure.
    block_scaled = {"mxfp8": constants.mxfp8_rate, "nvfp4": constants.nvfp4_rate}
    narrow = block_scaled.get(precision, 1.0) * peak_flops(gpu, "fp8")
    return DeviceRates(
        dense,
        wide,
        narrow,
        gpu.bandwidth_gbs * 1e9 * constants.memory_share,
        constants,
        gpu.device != "cpu",
    )


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the forward and the backward (B) of one microbatch."""

    forward: Number
    backward: Number
    weight_grad: Number = 0.0
    """Part of the backward that computes weight gradients (W)."""
    idle_forward: Number = 0.0
    """Part of the forward in which the GPU waits for the host: communication hides in it."""
    idle_backward: Number = 0.0
    """Part of the backward in which the GPU waits for the host."""
    last_gemm: Number = 0.0
    """Part of the forward behind the last tensor that it saves: a layer's down-projection."""

    @property
    def recomputed(self) -> Number:
        """Seconds of recomputing what backward needs, and no more."""
        return self.forward - self.last_gemm


def gemm_seconds(
    m: DeviceRates,
    rows: Number,
    columns: Number,
    inner: Number,
    element: int,
    narrow: bool = False,
    result: Number | None = None,
) -> Number:
    """Seconds of one GEMM [rows, inner] x [inner, columns], by the roofline.

    FLOP/s approach the reachable rate as 1 / (1 + half_dim (1/M + 1/N + 1/K)); dims that are no
    multiple of `ALIGNMENT_BYTES` run slower kernels (NVIDIA, Matrix Multiplication Background).

    Args:
        m: Reachable rates.
        rows: M.
        columns: N.
        inner: K.
        element: Bytes per element of operands and result.
        narrow: Whether the GEMM runs in 8 bits or fewer.
        result: Bytes that an element of the result moves, where it is not written in `element`:
            one that is added to what is there is read and written.
    """
    c = m.constants
    rate = m.narrow_flops * c.narrow_share if narrow else m.flops_16bit * c.gemm_share
    # Short dims leave tiles and the last wave of thread blocks partly empty.
    shortness = 1 + c.gemm_half_dim * (1 / rows + 1 / columns + 1 / inner)
    misaligned = _is_misaligned(columns, element) | _is_misaligned(inner, element)
    math = 2 * rows * columns * inner / rate * shortness * (1 + c.gemm_misaligned * misaligned)
    moved = element if result is None else result
    operands = (rows * inner + columns * inner) * element
    memory = (rows * columns * moved + operands) / m.bandwidth
    return np.maximum(math, memory)


def _is_misaligned(width: Number, element: int) -> Mask:
    return (width * element) % ALIGNMENT_BYTES != 0


def fused_attention(m: DeviceRates, flops: Number, head_dim: int, length: Number) -> PassTimes:
    """Seconds of FlashAttention-2, whose backward does 2.5 times the FLOPs of forward (2307.08691).

    Forward takes one exponential a score, whatever the width of a head: where heads are narrower
    than `attention_balanced_dim`, it takes longer than the score's products. Backward computes it
    again, beside 2.5 times the products.

    Args:
        m: The GPU.
        flops: Forward FLOPs of the causal half.
        head_dim: Width of a head.
        length: Tokens of a sequence; short ones leave thread blocks without work.
    """
    c = m.constants
    short = 1 + c.attention_half_length / length
    products = flops / (m.flops_16bit * c.attention_share) * short
    narrow = 1 / c.attention_narrow if head_dim < NARROW_HEAD_DIM else 1.0
    forward = products * max(narrow, c.attention_balanced_dim / head_dim)
    backward = 2.5 * products * max(narrow, c.attention_balanced_dim / (2.5 * head_dim))
    return PassTimes(forward, backward / c.attention_backward)


def unfused_attention(
    m: DeviceRates, flops: Number, head_dim: int, scores: Number, dropout: float
) -> PassTimes:
    """Attention as batched GEMMs and a softmax, whose scores pass through memory.

    Args:
        m: The GPU.
        flops: Forward FLOPs of the causal half; the GEMMs compute both halves.
        head_dim: Width of a head.
        scores: Elements of the scores of all sequences and heads.
        dropout: 1 where the framework drops from the probabilities.
    """
    rate = m.flops_16bit * m.constants.unfused_share * min(1.0, head_dim / 128)
    moved = 1.5 * scores / m.bandwidth
    gemms = 2 * flops / rate * (1 + m.constants.gemm_misaligned * _is_misaligned(head_dim, 2))
    return PassTimes(gemms + (4 + 5 * dropout) * moved, 2 * gemms + (6 + 5 * dropout) * moved)
