"""Memory of one layer's attention: what each kernel saves for backward, and its temporaries.

Counted as `models/attention/` allocates, whose rehearsals count the same.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.attention_tile_memory import runs_tiles, tiled_backward_bytes
from workbench.plan.model.attention_kernel import is_aligned, repeats_heads

FP32 = 4
"""Bytes of an element that torch's math attention computes in, whatever its operands' dtype."""


def saved_attention_bytes(w: Workload) -> Number:
    """Bytes saved beyond queries, keys, values and output: the softmax, or its statistics, and
    copies of operands.

    Unfused attention saves its scores (5 a s^2 b of 2205.05198 with dropout). FlashAttention saves
    one fp32 log-sum-exp per head and token.
    """
    statistics: Number = FP32 * w.heads * w.tokens
    if not w.fixed.framework.kernels.fused_attention:
        element = w.fixed.framework.saved_tensors.score_bytes
        statistics = element * w.heads * w.tokens * w.fixed.sequence_length
    if _is_math(w):
        statistics = saved_probability_bytes(w)
    return statistics + copied_operand_bytes(w)


def copied_operand_bytes(w: Workload) -> Number:
    """Bytes that operands take besides those of the projections: key-value heads repeated for every
    query head, heads padded to the kernel's multiple, and operands upcast.
    """
    return repeated_kv_bytes(w) + _padded_head_bytes(w) + _upcast_operand_bytes(w)


def repeated_kv_bytes(w: Workload) -> Number:
    """Additional bytes where attention repeats key-value heads for every query head
    (`plan/model/attention_kernel.py`).

    The unrepeated heads are freed, except those that Ulysses has exchanged together with the
    queries, which math attention saves scaled. Ring attention does not use the attention seam.
    """
    s = w.fixed
    if not repeats_heads(s.attention, w.shape):
        return 0.0
    exchanged = np.asarray((w.ulysses > 1) & np.logical_not(_is_math(w)))
    repeats = w.k_width * np.where(exchanged, w.kv_head_repeats, 1.0) < w.q_width
    extra_width = w.q_width + w.attended_width - np.where(exchanged, 0.0, w.k_width + w.v_width)
    applies = repeats & np.asarray(w.ring == 1)
    num_bytes: Number = applies * extra_width * w.tokens * w.element_bytes
    return num_bytes


def _padded_head_bytes(w: Workload) -> Number:
    """Additional bytes of flash attention's padded heads, whose output is saved padded too."""
    s, head_dim = w.fixed, w.shape.query_dim
    on_gpu = s.gpu.device == "cuda"
    if not on_gpu or s.attention != "flash" or is_aligned(s.precision, head_dim):
        return 0.0
    factor = -(-head_dim // 8) * 8 / head_dim
    output = factor * w.attended_width - w.padded_output_width  # counted beside already
    extra_width = (factor - 1) * (w.q_width + w.k_width + w.v_width) + output
    return extra_width * w.tokens * w.element_bytes


def _upcast_operand_bytes(w: Workload) -> Number:
    """Additional bytes of math attention's fp32 queries, keys and values."""
    wider = np.maximum(0.0, FP32 - w.element_bytes)
    num_bytes: Number = _is_math(w) * wider * (2 * w.q_width + w.attended_width) * w.tokens
    return num_bytes


def probability_bytes(w: Workload) -> Number:
    """Bytes of fp32 scores [B, H, T, T] of one layer."""
    return FP32 * w.heads * w.tokens * w.fixed.sequence_length


def saved_probability_bytes(w: Workload) -> Number:
    """Bytes of math attention's probabilities, and of the tanh of a soft-cap beside them."""
    capped = w.shape.attention_softcap is not None
    return (1 + capped) * probability_bytes(w)


def attention_backward_bytes(w: Workload) -> Number:
    """Temporaries of attention's backward, at the most.

    Math: gradients of probabilities and scores, and of values. Fused kernels: the gradients of
    output and operands; on GPUs also an fp32 accumulator of the queries' gradient for 16-bit
    operands, and gradients of keys and values for every query head where flash groups them.
    """
    s = w.fixed
    if _is_math(w):
        return 2 * probability_bytes(w) + FP32 * w.attended_width * w.tokens
    if runs_tiles(w):
        return tiled_backward_bytes(w)
    widths = w.q_width + w.k_width + w.v_width + w.attended_width
    gradients = widths * w.tokens * w.element_bytes
    if s.gpu.device != "cuda":
        return gradients
    workspace = FP32 * (w.heads + (w.element_bytes < FP32) * w.q_width) * w.tokens
    grouped = (s.attention == "flash") * (w.q_width + w.attended_width) * (w.k_width < w.q_width)
    return gradients + workspace + grouped * w.tokens * w.element_bytes


def freed_by_attention_backward(w: Workload) -> Number:
    """Bytes of a layer's saved activations that are freed by then, beside the feed-forward's: of
    math the output projection's input and the values. Fused kernels read their output.
    """
    values = max(FP32, float(w.element_bytes))
    return _is_math(w) * (w.element_bytes + values) * w.attended_width * w.tokens


def _is_math(w: Workload) -> bool:
    return w.fixed.attention == "math"


def restored_attention_bytes(w: Workload) -> Array:
    """Bytes that selective recompute of attention restores before backward."""
    operands = (2 * w.q_width + w.attended_width) * w.tokens * max(FP32, float(w.element_bytes))
    return np.asarray(
        _is_math(w) * (saved_probability_bytes(w) + operands) + padded_output_bytes(w)
    )


def padded_output_bytes(w: Workload) -> Number:
    """Bytes of latent attention's padded output, which a kernel saves beside what the output
    projection reads of it; math attention saves its probabilities instead.
    """
    return w.padded_output_width * w.tokens * w.element_bytes * float(not _is_math(w))
