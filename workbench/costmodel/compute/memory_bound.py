"""Seconds of a layer's memory-bound operators: norms, residuals, rotary positions, activations,
and the casts of fp8.
"""

from __future__ import annotations

from workbench.costmodel.compute.engine_traffic.engine_operators import (
    casts_eagerly,
    counts_operators,
    dropout_bytes,
    layer_bytes,
)
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes
from workbench.costmodel.compute.frozen_layers import adapter_bytes, frozen_layer_bytes
from workbench.costmodel.compute.kernel_launches import adds_expert_biases, fused_seam_shares
from workbench.costmodel.compute.kernel_rates import DeviceRates, PassTimes
from workbench.costmodel.compute.seam_bytes import seam_bytes
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.quantized_formats import QuantizedFormat
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager
from workbench.costmodel.rates.constants import Constants

MASK_BYTES = 2 * 2
"""Bytes of masks, of both branches of a layer, that an element's dropout moves where they are kept.
"""
EXPERT_BIAS_BYTES = 12, 16
"""Bytes (forward, backward) that biases move for an element of the experts' output in 16 bits where
they are added expert by expert (Megatron-core, `TEGroupedMLP._apply_bias`): their product with the
router's weights, the sum, and the copy that joins the experts; of backward two products, their sums
and the copy that joins the split gradients.
"""


def memory_bound_pass(
    w: Workload, m: DeviceRates, is_moe: bool, frozen: AdaptedLayer | None = None
) -> PassTimes:
    """Seconds of norms, residuals, rotary positions and activation of one layer, by bytes moved.

    Args:
        w: Per-rank problem sizes.
        m: Reachable rates.
        is_moe: Whether the feed-forward is an MoE.
        frozen: Its kind where its weights are frozen beside adapters.
    """
    if counts_operators(w):
        return counted_pass(w, m, is_moe, frozen)
    textbook = _textbook_pass(w, m, is_moe)
    if frozen is None:
        return textbook
    added = counted_seconds(m, adapter_bytes(w, frozen, m.constants.dropout_bytes))
    backward = frozen.has_backward * textbook.backward + added[1]
    return PassTimes(textbook.forward + added[0], backward)


def _textbook_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """The same of a layer without adapters, of a framework whose operators are not counted."""
    h, half = w.hidden_per_rank / w.sequence_parallel, w.element_bytes / 2
    drop = h * _dropout_bytes(w, m.constants)
    # An MoE activates every routed row, and copies tokens for dispatch and combine.
    inputs, wide = gemm_inputs(w, is_moe)
    other = m.constants.plain_traffic
    routed = inputs - 2 * h
    copies = other * (drop + 8 * routed)
    biases = [other * routed * adds_expert_biases(w, is_moe) * bias for bias in EXPERT_BIAS_BYTES]
    share = 1 if w.shape.rotary_dim is None else w.shape.rotated_width / w.shape.query_dim
    rotated = share * (w.q_width + w.k_width) if w.shape.positions == "rope" else 0.0
    normed = w.shape.num_residual_norms * h + (w.q_width + w.k_width) * bool(w.shape.qk_norm)
    forward, backward = (
        normed * norm + rotated * rope + wide * activation + copies + bias
        for (norm, rope, activation), bias in zip(seam_passes(w, m.constants, is_moe), biases)
    )
    if w.quantized_format is not None:
        casts = _quantized_bytes(w, w.quantized_format, is_moe)
        forward, backward = (
            bound + other * cast for bound, cast in zip((forward, backward), casts)
        )
    rate = m.bandwidth / (w.tokens * half)
    return PassTimes(forward / rate, backward / rate)


def _dropout_bytes(w: Workload, c: Constants) -> float:
    """Bytes an element of 16 bits that dropping both branches of a layer moves in either direction:
    of this engine its masks, drawn in both; of others a byte of a mask that is kept, and one more.
    """
    if w.fixed.framework.kernels.counts_operators:
        return 2 * c.dropout_bytes * 2 / w.element_bytes * w.fixed.dropout
    return MASK_BYTES * float(w.fixed.framework.saved_tensors.dropout_masks or w.fixed.dropout)


def seam_passes(w: Workload, c: Constants, is_moe: bool) -> list[tuple[Number, Number, Number]]:
    """Bytes an element of (norm and residual, rotary positions, activation), forward and backward.

    Small activations of this engine leave fused seams eager (`kernels/fused_seams.py`).
    """
    single = w.fixed.framework.kernels.single_norm
    fused, plain = seam_bytes(c.counted_kernels, single), seam_bytes("eager", single)
    shares: tuple[Number, Number, Number] = (1.0, 1.0, 1.0)
    if keeps_small_seams_eager(w):
        shares = fused_seam_shares(w, is_moe)
    passes = []
    for direction in (0, 1):
        by_kernel = [
            (
                scale * (getattr(s, w.shape.norm)[direction] + s.residual[direction]),
                scale * s.rope[direction],
                scale * (s.gated if w.shape.gated else s.plain)[direction],
            )
            for s, scale in ((fused, c.traffic), (plain, c.plain_traffic))
        ]
        norm, rope, activation = (
            eager + (own - eager) * share for own, eager, share in zip(*by_kernel, shares)
        )
        passes.append((norm, rope, activation))
    return passes


def gemm_inputs(w: Workload, is_moe: bool) -> tuple[Number, Number]:
    """Elements per token (of the hidden width, of the feed-forward width) that a layer's GEMMs
    read.
    """
    h = w.hidden_per_rank / w.sequence_parallel
    if is_moe and w.shape.moe:
        return (
            2 * h + w.routed_rows_per_token * h,
            w.routed_rows_per_token * w.expert_ffn + w.shared_ffn,
        )
    return 2 * h, w.ffn


def counted_pass(
    w: Workload, m: DeviceRates, is_moe: bool, frozen: AdaptedLayer | None = None
) -> PassTimes:
    """The same of this engine's operators, counted one by one; the casts of fp8 are textbook where
    it does not run such a model.
    """
    drawn = m.constants.dropout_bytes
    moved = layer_bytes(w, is_moe) if frozen is None else frozen_layer_bytes(w, frozen, drawn)
    dropped = dropout_bytes(w, m.constants.dropout_bytes)
    moved += MovedBytes(dropped, dropped)
    if w.quantized_format is not None and not casts_eagerly(w):
        casts = _quantized_bytes(w, w.quantized_format, is_moe)
        moved += MovedBytes(*(w.tokens * cast for cast in casts))
    return PassTimes(*counted_seconds(m, moved))


def _quantized_bytes(
    w: Workload, quantized: QuantizedFormat, is_moe: bool
) -> tuple[Number, Number]:
    """Bytes per token (forward, backward) that quantizing the operands of narrow GEMMs moves.

    Kernels of norms write 8 bits themselves where the recipe's scales are known by then; outputs of
    attention and of the activation, and gradients, are quantized apart.
    """
    h, out = w.hidden_per_rank / w.sequence_parallel, w.q_width + w.k_width + w.v_width
    inputs, wide = gemm_inputs(w, is_moe)
    if not w.fixed.framework.kernels.fused_quantization:
        return 4 * (inputs + wide), 4 * (inputs + wide)
    apart, after_norm = quantized.quantization_bytes(w.fixed.gpu, w.fixed.adapter_rank > 0)
    routed = inputs - 2 * h
    norms = (2 - bool(is_moe and w.shape.moe)) * h  # a router's input stays in 16 bits
    gradients = 2 * h + routed + out + (1 + w.shape.gated) * wide
    return apart * (w.o_width + wide + routed) + after_norm * norms, apart * gradients


def counted_seconds(m: DeviceRates, moved: MovedBytes) -> tuple[Number, Number]:
    """Seconds (forward, backward) of operators whose bytes are counted."""
    each = m.constants.plain_traffic / m.bandwidth
    return each * moved.forward, each * moved.backward
