"""Activation memory: what each module saves for backward, and which temporaries it needs.

The counts follow `models/` and `parallel/` tensor by tensor, with torch's eager operators; they
extend the activation memory of Megatron-LM (Korthikanti et al., 2205.05198: s b h (34 + 5 a s / h)
per layer with dropout and unfused attention) by grouped queries, gated MLPs, MoE, LoRA and
selective recompute. A peak is a live set: every function says what is live at one phase beyond what
is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, dequantized_bytes, last_layers
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.layer_gemms import layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.adapter_memory import (
    BaseSaved,
    frozen_feed_forward_backward,
    frozen_forward,
    saved_with_adapters,
    unsaved_product,
)
from workbench.costmodel.memory.attention_memory import (
    padded_output_bytes,
    restored_attention_bytes,
    saved_attention_bytes,
)
from workbench.costmodel.memory.norm_memory import (
    head_norms_saved,
    last_norm_saved,
    norm_saved,
    residual_norms_saved,
)
from workbench.runtime_facts.cast_sizes import GRADIENT_CAST_NUMEL
from workbench.runtime_facts.fused_thresholds import MIN_FUSED_SEAM_NUMEL

TOKEN_ID_BYTES = 8
"""Bytes of an int64 token id."""
GELUS = ("gelu", "gelu_exact")
"""Activations that save their input, and whose gradient takes the place of that of their output."""
CHOICE_BYTES = 2
"""Bytes of an int16 index of an expert."""


@dataclass(frozen=True)
class LayerActivations:
    """Activation memory of one layer and one microbatch on one rank, bytes."""

    saved: Number
    """Saved from forward to backward."""
    needed: Number
    """What backward reads: selective recompute restores what of it was not saved."""
    checkpoint: Number
    """Saved instead of `saved` where the layer is fully recomputed: its input, and of an MoE the
    experts that it chose.
    """
    forward: Number
    """Temporaries at the end of its forward."""
    last_gemm: Number
    """Temporaries during the last GEMM of its forward, the result included."""
    feed_forward_backward: Number
    """Temporaries during the backward of the down projection and the activation."""
    column_parallel_backward: Number
    """Temporaries during the backward of the gate and up projections, where sequence parallelism
    all-gathers their input.
    """
    freed_feed_forward: Number
    """Part of `saved` that is freed by then."""
    freed_before_norm: Number
    """Part of `saved` that is freed when the norm before the feed-forward runs backward."""
    norm_backward: Number
    """Temporaries during that norm's backward."""
    output_norm_backward: Number
    """The same of the norm at the output of the feed-forward layer, 0 without one: beside the
    gradient that it is given and its input, which the layer saved.
    """


@lru_cache(maxsize=8)  # what is saved and each phase of the same layer ask for it
def layer_activations(
    w: Workload, is_moe: bool = False, is_split: bool = False, adapted: AdaptedLayer | None = None
) -> LayerActivations:
    """Activation memory of one transformer layer and one microbatch.

    Args:
        w: Per-rank problem sizes.
        is_moe: Whether the feed-forward is an MoE.
        is_split: Whether its backward leaves weight gradients to a separate W.
        adapted: Which of its linears have adapters, where the others are frozen.
    """
    wide, matrix = _feed_forward(w, is_moe)
    is_shared = w.shape.parallel_residual == "one_norm"
    ffn, norm, delta = _feed_forward_saved(w, is_moe), last_norm_saved(w), 0.0 * w.tokens
    if adapted is not None:
        base = _base_saved(w, is_moe)
        own = saved_with_adapters(w, adapted, base)
        delta = own.attention + own.norm + own.feed_forward - base.total
        ffn, norm = own.feed_forward, own.norm
    saved, needed = _saved_and_needed(w, is_moe, wide, delta)
    shard = w.residual_bytes
    branch = shard + (wide if w.shape.mlp == "relu" else 0.0)
    # Row-parallel output projection under sequence parallelism: its all-gathered input, its partial
    # sum, and the reduce-scattered result, without and with its bias.
    last_gemm = branch + (w.sequence_parallel > 1) * (
        shard * (1 + (w.shape.biases == "all")) + 2 * w.hidden_activation_bytes
    )
    if w.shape.parallel_residual:  # beside the layer's input and attention's output, then the sum
        waiting = shard * (1 + (w.layers > 1))
        last_gemm = np.maximum(last_gemm, branch + shard) + waiting
    backward = _feed_forward_backward(w, wide, matrix, is_split)
    if adapted is not None:
        backward = frozen_feed_forward_backward(w, wide, adapted, base)
        last_gemm = last_gemm + dequantized_bytes(w, is_moe) + unsaved_product(adapted, base)
        last_gemm = np.maximum(last_gemm, frozen_forward(w, wide, adapted, base))
    if is_moe and not w.fixed.framework.experts.weights_outputs:
        backward = np.maximum(backward, _routed_backward(w))
    if w.fixed.algorithm != "1d":
        gathered = grid_block_bytes(w, wide, matrix, w.hidden_activation_bytes)
        backward, last_gemm = backward + gathered, branch + shard + gathered
    return LayerActivations(
        saved=saved,
        needed=needed,
        checkpoint=shard
        * (1 - w.fixed.framework.recompute.offload_inputs)
        * (1 - w.fixed.offloads_checkpoints)
        + _kept_choices(w) * is_moe,
        forward=branch,
        last_gemm=last_gemm,
        feed_forward_backward=backward,
        column_parallel_backward=_column_parallel_backward(w, wide, matrix)
        * gathers_sequence(w)
        * float(not is_moe),
        freed_feed_forward=ffn,
        # Branches that share a norm have both run backward when it does.
        freed_before_norm=saved if is_shared else ffn + norm,
        norm_backward=norm_backward(w),
        output_norm_backward=np.maximum(0.0, norm_backward(w) - 2 * shard) * w.shape.norms_outputs,
    )


def last_layer_activations(w: Workload, is_split: bool = False) -> LayerActivations:
    """That of the last layer of each of `w.places`, at whose backward memory peaks."""
    if not w.fixed.adapter_rank:
        return layer_activations(w, w.shape.moe is not None, is_split)
    found: dict[str, Number] = {}
    for kind, is_last in last_layers(w):
        own = layer_activations(w, kind.is_moe, is_split, kind)
        for field in fields(own):
            value = np.where(is_last, getattr(own, field.name), found.get(field.name, 0.0))
            found[field.name] = value
    return LayerActivations(**found)


def _base_saved(w: Workload, is_moe: bool) -> BaseSaved:
    """What a layer saves where every weight has a gradient, by what reads it."""
    wide, _ = _feed_forward(w, is_moe)
    apart = w.shape.branch_norms == "both"
    output_norm = norm_saved(w, own_input=False) * apart
    shares = w.shape.parallel_residual == "one_norm"
    routed = w.routed_rows_per_token * w.expert_ffn * w.tokens * w.element_bytes * is_moe
    has_product = float(w.shape.mlp != "relu")
    gathered = routed_input = 0.0 * w.tokens
    if is_moe:
        routed_input = w.routed_rows_per_token * w.hidden_activation_bytes
        gathered = _gathered_moe_input(w)
    product = has_product * wide
    return BaseSaved(
        first_norm=norm_saved(w) - w.residual_bytes,
        last_norm=last_norm_saved(w) - w.residual_bytes * (1 - shares) + output_norm,
        first_output=w.residual_bytes,
        last_output=w.residual_bytes * (1 - shares) + gathered,
        last_output_read=np.where(gathered > 0, gathered, w.residual_bytes),
        attention=_attention_saved(w),
        unread_output=_unread_output(w),
        activation=_activation_saved(w, wide) - product,
        gate_operators=w.shape.gated * (1 - runs_fused_seam(w, wide / w.element_bytes)),
        routing=_routing_saved(w) * is_moe - routed_input - gathered,
        dense_product=product - has_product * routed,
        routed_product=has_product * routed,
        routed_input=routed_input,
    )


def _attention_saved(w: Workload) -> Number:
    """Bytes that attention saves, from what projects its input to what projects its output."""
    widths = w.q_width + w.k_width + w.v_width + w.o_width
    own = widths * w.tokens * w.element_bytes + _ulysses_saved(w)
    own = own + padded_output_bytes(w) * (1 - w.searched.selective)
    own = own + saved_attention_bytes(w) * (1 - w.searched.selective)
    return own + _mla_latents(w) + head_norms_saved(w)


def _unread_output(w: Workload) -> Number:
    """Bytes of attention's output that its own backward does not read: of math attention, which
    reads its probabilities, where it is recomputed, and where it is a copy.
    """
    is_copy = np.maximum(np.asarray(w.ulysses > 1), np.asarray(w.padded_output_width > 0))
    unread = np.maximum(is_copy, w.searched.selective) if w.fixed.attention != "math" else 1.0
    return unread * w.o_width * w.tokens * w.element_bytes


def _saved_and_needed(
    w: Workload, is_moe: bool, wide: Number, delta: Number
) -> tuple[Number, Number]:
    """(bytes saved from forward to backward, bytes that backward reads); selective recompute saves
    less than backward reads, and frozen weights change it by `delta`.
    """
    recompute = w.fixed.framework.recompute
    saved = residual_norms_saved(w) + _attention_saved(w) + _feed_forward_saved(w, is_moe)
    saved = saved + _fp8_saved_delta(w, is_moe) + delta
    masks = w.fixed.framework.saved_tensors.dropout_masks * w.tokens * w.hidden_per_rank * 2
    saved = saved + masks / w.sequence_parallel
    if recompute.alternate_ops:
        return saved + w.searched.selective * (alternate_ops_saved(w, wide) - saved), saved
    if recompute.saved_share is not None:
        saved = saved * (1 - w.searched.selective * (1 - recompute.saved_share))
    return saved, saved + w.searched.selective * restored_attention_bytes(w)


def _feed_forward_backward(w: Workload, wide: Number, matrix: Number, is_split: bool) -> Number:
    """Temporaries during the backward of the down projection and the activation."""
    gathered = w.hidden_activation_bytes - w.residual_bytes
    # With a deferred W no weight gradient exists yet, but the down projection's input stays.
    if is_split and w.fixed.algorithm == "1d":
        return (3 if w.shape.gated else 2) * wide + gathered
    # Down projection: the gradients of input and weight, then the weight's accumulation, where the
    # gradient of its input has taken the place of that input, but of ReLU, which saves it too.
    # Activation of a gate: gradients of gate and up, where the gradient of their product is freed.
    if w.fixed.tile_factor > 1:
        return _tiled_feed_forward_backward(w, wide, matrix / w.fixed.tile_factor)
    gradients = wide + matrix * w.element_bytes * separate_weight_gradients(w)
    accumulated = accumulated_gradient_bytes(w, matrix) + wide * (w.shape.mlp == "relu")
    activation = (1 if w.shape.mlp in GELUS else 2) * wide
    gradients = gradients - _unit_bucket_bytes(w)
    peak: Number = np.maximum(np.maximum(gradients, accumulated), activation)
    return np.maximum(peak, _cast_to_fp8_bytes(w, wide, matrix)) + gathered


def _unit_bucket_bytes(w: Workload) -> Number:
    """Bytes of the bucket of a ZeRO-3 unit's gradients, which the first of them allocates once it
    is computed, where the engine does so.
    """
    behavior = w.fixed.framework.data_parallel
    if w.zero < 3 or not behavior.frees_buffers or w.fixed.traced is not None:
        return 0.0
    return w.packed_counts.trained_layer * w.gradient_element_bytes * w.reduce_microbatch


def _tiled_feed_forward_backward(w: Workload, wide: Number, tile: Number) -> Number:
    """The same where the down projection is computed by tiles: their gradients are computed into
    their buckets where dtypes allow, and the activation runs when the last has been reduced.
    """
    narrow = (w.gradient_element_bytes != w.element_bytes) & (w.fixed.gpu.device != "cuda")
    gradients = wide + accumulated_gradient_bytes(w, tile) * narrow
    activation = (1 if w.shape.mlp in GELUS else 2) * wide - tile * w.gradient_element_bytes
    peak: Number = np.maximum(gradients, activation)
    return peak


def _routed_backward(w: Workload) -> Number:
    """Temporaries during the backward of an MoE's combination and of its experts' last GEMM: the
    gradient of the routed outputs before and after a permutation, or beside that of the GEMM's
    input.
    """
    routed = w.routed_rows_per_token * w.tokens * w.element_bytes
    width: Number = np.maximum(w.hidden_per_rank, w.expert_ffn)
    return routed * (w.hidden_per_rank + width)


def _cast_to_fp8_bytes(w: Workload, wide: Number, matrix: Number) -> Number:
    """Temporaries while backward of the down projection casts its weight, or its input beside that
    input's gradient; the output gradient is there in 8 bits.
    """
    temporaries = w.fixed.framework.kernels.fp8_cast_bytes
    if w.fixed.precision != "fp8" or not temporaries:
        return 0.0
    gradient = w.hidden_activation_bytes / w.element_bytes
    of_input = wide + temporaries * wide / w.element_bytes
    cast: Number = np.maximum(of_input, temporaries * matrix) + gradient
    return cast


def _column_parallel_backward(w: Workload, wide: Number, matrix: Number) -> Number:
    """Temporaries during the backward of gate and up, whose input is all-gathered once more."""
    if not has_weight_gradients(w):  # or not, where only gradients of frozen weights need it
        of_gemm = (2 if w.shape.gated else 1) * wide + w.hidden_activation_bytes
        return np.maximum(of_gemm, 3 * w.hidden_activation_bytes)
    operands = w.hidden_activation_bytes + (2 if w.shape.gated else 1) * wide
    gradient = matrix * w.element_bytes * separate_weight_gradients(w)
    return input_gradient_in_flight(w) + weight_gradient_peak(
        w, operands, gradient, accumulated_gradient_bytes(w, matrix)
    )


def gathers_sequence(w: Workload) -> Number:
    """1 where column-parallel layers all-gather sequence shards into temporaries."""
    return (w.sequence_parallel > 1) * float(w.fixed.framework.model_parallel.regathers_inputs)


def input_gradient_in_flight(w: Workload) -> Number:
    """Bytes of a column-parallel layer's input gradient during its all-reduce, or the full one and
    its shard during a reduce-scatter.
    """
    return w.hidden_activation_bytes + w.residual_bytes * gathers_sequence(w)


def weight_gradient_peak(
    w: Workload, operands: Number, gradient: Number, accumulated: Number
) -> Number:
    """Most bytes live beside an input gradient in flight while a weight gradient is computed and
    accumulated.

    Args:
        w: Per-rank problem sizes.
        operands: Bytes of the operands of the weight gradient's GEMM.
        gradient: Bytes of the weight gradient.
        accumulated: Bytes live while it is accumulated into its bucket.
    """
    freed = w.residual_bytes * gathers_sequence(w)
    return np.maximum(operands + np.maximum(0.0, gradient - freed), accumulated - freed)


def _ulysses_saved(w: Workload) -> Number:
    """Bytes that Ulysses (2309.14509) saves besides: repeated key-value heads, and attention's
    output both by heads and by tokens, unless backward exchanges it again; math attention saves
    its probabilities in place of its output.
    """
    if not w.fixed.has_context_parallel:
        return 0.0
    keeps = w.fixed.framework.model_parallel.keeps_exchanged_output and w.fixed.attention != "math"
    twice = keeps * (1 - w.searched.selective) * (w.padded_output_width == 0)
    extra_width = (w.kv_head_repeats - 1) * (w.k_width + w.v_width) + w.o_width * twice
    return (w.ulysses > 1) * extra_width * w.tokens * w.element_bytes


def grid_block_bytes(w: Workload, x: Number, matrix: Number, y: Number) -> Number:
    """Bytes of other ranks' blocks that a tensor grid needs during one GEMM.

    SUMMA (2-D, 2.5-D) holds one broadcast block of input and weight; 3-D holds all that it
    all-gathers and the partial result before its reduce-scatter.

    Args:
        w: Per-rank problem sizes.
        x: Bytes of the input shard.
        matrix: Elements of the weight shard.
        y: Bytes of the output shard.
    """
    if w.fixed.algorithm == "3d":
        return w.tiling.gathered_blocks * (x + y + matrix * w.element_bytes)
    return (w.tiling.hidden_parts > 1) * (x + matrix * w.element_bytes)


def alternate_ops_saved(w: Workload, wide: Number) -> Number:
    """Bytes saved by per-operator selective recompute, of alternate GEMMs.

    Saved are a layer's input, attention's output and the result of every second GEMM: queries,
    values, the gate (or the only up projection) and, after a gate, the down projection. A compiler
    drops the last, which no gradient reads.
    """
    stream = w.residual_bytes
    attention = (
        w.q_width + w.v_width + w.o_width
    ) * w.tokens * w.element_bytes + 4 * w.heads * w.tokens
    return (
        stream
        + attention
        + wide
        + w.hidden_activation_bytes * (w.shape.gated and w.fixed.kernels != "compiled")
    )


def has_weight_gradients(w: Workload) -> float:
    """1 where the model's own weights have gradients, 0 where LoRA freezes them."""
    return float(w.fixed.adapter_rank == 0)


def separate_weight_gradients(w: Workload) -> float:
    """1 where a weight gradient is a tensor of its own before it is accumulated, 0 where GEMMs add
    to the accumulated one.
    """
    return has_weight_gradients(w) * w.fixed.framework.model_states.separate_gradient


def head_gradients(w: Workload) -> float:
    """Tensors of the head's shape while its weight gradient is computed: the gradient, or a
    placeholder for it (Megatron-core `tensor_parallel/layers.py`, `grad_added_to_main_grad`).
    """
    placeholder = w.fixed.framework.model_states.gradient_placeholder
    return max(separate_weight_gradients(w), has_weight_gradients(w) * placeholder)


def dummy_weight_gradient_bytes(w: Workload) -> Number:
    """Placeholders for weight gradients that GEMMs have accumulated elsewhere: one of each weight's
    shape, for the life of the process.
    """
    if not w.fixed.framework.model_states.dummy_weight_gradients:
        return 0.0
    kinds = [False, True] if w.shape.moe else [False]
    shapes = {
        (float(np.max(p.columns)), float(np.max(p.inner)), is_moe): p.columns * p.inner
        for is_moe in kinds
        for p in layer_gemms(w, is_moe)
    }
    total: Number = sum(shapes.values())
    return total * w.element_bytes * has_weight_gradients(w)


def _fp8_saved_delta(w: Workload, is_moe: bool) -> Number:
    """Change of the saved bytes where fp8 GEMMs save their inputs in 8 bits.

    Outputs of norms, the experts' and the down projection's input shrink; attention's output, which
    its own backward reads in 16 bits, and what a router reads need a second, narrow copy.
    """
    quantized = w.quantized_format
    if quantized is None or not w.fixed.framework.saved_tensors.fp8_inputs:
        return 0.0
    wide, _ = _feed_forward(w, is_moe)
    attended = w.o_width * w.tokens * w.element_bytes
    replaced = (1 if is_moe else 2) * w.residual_bytes + wide
    if is_moe:
        replaced = replaced + w.routed_rows_per_token * w.hidden_activation_bytes
    return (attended + replaced) * quantized.element_bytes / w.element_bytes - replaced


def _feed_forward(w: Workload, is_moe: bool) -> tuple[Number, Number]:
    """(bytes of one tensor of feed-forward width, parameters of the down projection)."""
    moe = w.shape.moe
    if not is_moe or moe is None:
        return w.ffn * w.tokens * w.element_bytes, w.ffn * w.weight_in_dim
    wide = (w.routed_rows_per_token * w.expert_ffn + w.shared_ffn) * w.tokens * w.element_bytes
    return wide, w.expert_ffn * w.weight_in_dim


def _feed_forward_saved(w: Workload, is_moe: bool) -> Number:
    """Bytes that the feed-forward saves: gate, up, activated gate and product; without a gate up
    and activated up (ReLU: only that); an MoE also its dispatched tokens and router probabilities.

    Where the router's weights multiply the experts' activations, in place of their outputs, tokens
    are routed from sequence shards and their outputs are not saved.
    """
    wide, _ = _feed_forward(w, is_moe)
    return _activation_saved(w, wide) + _routing_saved(w) * is_moe


def _activation_saved(w: Workload, wide: Number) -> Number:
    recomputed = runs_fused_seam(w, wide / w.element_bytes)
    gated = w.fixed.framework.saved_tensors.gated_tensors - recomputed  # the activated gate
    tensors: Number = gated if w.shape.gated else 1 if w.shape.mlp == "relu" else 2
    return tensors * wide


def _routing_saved(w: Workload) -> Number:
    if w.shape.moe is None:
        return 0.0
    copies = w.fixed.framework.experts.routed_copies
    routed = w.routed_rows_per_token * copies * w.hidden_activation_bytes
    return _gathered_moe_input(w) + routed + w.shape.moe.experts * w.tokens * 4


def _gathered_moe_input(w: Workload) -> Number:
    """Bytes of an MoE layer's input, all-gathered from sequence shards."""
    gathers = w.fixed.framework.experts.weights_outputs * (w.sequence_parallel > 1)
    return gathers * w.hidden_activation_bytes


def _kept_choices(w: Workload) -> Number:
    """Bytes of each token's choices of experts, where recomputed layers repeat them."""
    moe = w.shape.moe
    if moe is None or not w.fixed.framework.recompute.keeps_expert_choices:
        return 0.0
    return CHOICE_BYTES * moe.top_k * w.tokens


def _mla_latents(w: Workload) -> Number:
    """Bytes of MLA's compressed queries and keys (2405.04434) and of their norms; in this engine
    also of the rotary key beside the latter and of the norms' statistics, and of a rank's own
    tokens alone under sequence parallelism.
    """
    mla = w.shape.mla
    if mla is None:
        return 0.0
    latents = 2.0 * (mla.kv_rank + (mla.q_rank or 0)) / w.tiling.hidden_parts * w.element_bytes
    if not w.fixed.framework.kernels.pads_values:
        return latents * w.tokens
    statistics = (1 + (mla.q_rank is not None)) * w.upcast_bytes
    own = latents + mla.rope_dim * w.element_bytes + statistics
    return own * w.tokens / w.sequence_parallel


def weight_gradient_bytes(w: Workload) -> Number:
    """Temporaries while the largest weight of a layer gets its gradient, in a separate W: none
    where the GEMM adds to the gradient itself.
    """
    _, matrix = _feed_forward(w, False)
    if w.fixed.gpu.device == "cuda":
        return 0.0
    return accumulated_gradient_bytes(w, matrix) * (w.gradient_element_bytes != w.element_bytes)


def accumulated_gradient_bytes(w: Workload, parameters: Number) -> Number:
    """Bytes of a weight gradient while it is accumulated into its bucket; where dtypes differ, it
    is upcast, on CPU in pieces of `GRADIENT_CAST_NUMEL`, by CUDA in registers.
    """
    widened = w.gradient_element_bytes * (w.gradient_element_bytes != w.element_bytes)
    if w.fixed.framework.model_states.upcasts_in_registers and w.fixed.gpu.device == "cuda":
        widened = 0.0 * widened
    return (
        parameters * w.element_bytes + np.minimum(parameters, GRADIENT_CAST_NUMEL) * widened
    ) * separate_weight_gradients(w)


def norm_backward(w: Workload) -> Number:
    """Temporaries of a norm's backward, its saved input included; the eager RMSNorm computes in
    fp32.
    """
    stream, upcast = (w.residual_bytes, w.upcast_bytes / w.element_bytes)
    if w.shape.norm == "layernorm":
        return 3 * stream
    eager = stream * (2 + 3 * upcast + (upcast if upcast > 1 else 0))
    return np.where(runs_fused_seam(w, stream / w.element_bytes), 3 * stream, eager)


def runs_fused_seam(w: Workload, entries: Number) -> Number:
    """Whether a seam over `entries` elements runs this engine's fused kernel."""
    return float(w.uses_fused_kernels) * (
        entries >= MIN_FUSED_SEAM_NUMEL * keeps_small_seams_eager(w)
    )


def keeps_small_seams_eager(w: Workload) -> bool:
    """Whether fused kernels leave some seams eager: on CPUs, those that are slower in this
    project's benchmark.
    """
    return w.uses_fused_kernels and w.fixed.gpu.device == "cpu" and w.fixed.kernels == "fused"


def _embedding_norm_saved(w: Workload) -> Number:
    """In this engine; published readings of BLOOM in another (data/validation) do not show it."""
    has = w.shape.embedding_norm and w.fixed.framework.kernels.counts_operators
    return norm_saved(w, own_input=False) if has else 0.0


def boundary_bytes(w: Workload) -> tuple[Array, Array]:
    """Bytes a microbatch needs besides its layers, by pipeline rank.

    Returns:
        (saved, on the way to the next stage). Saved: position tables, the embedding's masks and
        its norm's input; the received input is what the first norm saves. On the way: an output
        until its send completes, however many microbatches are in flight.
    """
    length = w.fixed.sequence_length / w.searched.context
    restart = w.fixed.separate_documents and w.shape.positions == "learned"
    indices = w.tokens if restart else length
    tables = w.shape.positions == "rope" and (2 if w.shape.window_rope_theta else 1)
    rotary = length * w.shape.rotated_width * w.element_bytes * tables
    saved = (
        w.zeros
        + (rotary + TOKEN_ID_BYTES * indices) * w.fixed.chunks
        + w.has_embedding * _embedding_norm_saved(w)
        + (w.tensor > 1) * w.has_embedding * (TOKEN_ID_BYTES + 1) * w.tokens
    )
    boundary = w.residual_bytes
    return saved, np.asarray(
        (1 - w.has_head * (w.fixed.chunks == 1)) * boundary * float(w.pipeline > 1)
    )


def embedding_backward(w: Workload) -> Number:
    """Temporaries of the embedding's backward: its gradient is dense, and a tied one is added to
    the head's.
    """
    if not has_weight_gradients(w):
        return 0.0 * w.tokens
    table = w.table_params
    positions = w.shape.max_positions * w.weight_in_dim if w.shape.positions == "learned" else 0.0
    gradients = w.hidden_activation_bytes + np.maximum(table, positions) * w.element_bytes
    if w.fixed.framework.model_states.frees_gradients:  # this gradient is the one that is kept
        return gradients
    if has_tied_head_on_rank(w) and separate_weight_gradients(w):
        return np.maximum(
            np.maximum(gradients, 2 * table * w.element_bytes) + table * w.element_bytes,
            accumulated_gradient_bytes(w, table),
        )
    return np.maximum(gradients, accumulated_gradient_bytes(w, np.maximum(table, positions)))


def has_tied_head_on_rank(w: Workload) -> bool:
    """Whether embedding and head of one rank share a weight, so that the head's gradient waits for
    the embedding's.
    """
    return w.shape.tied and w.pipeline == 1
