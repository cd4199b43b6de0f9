"""Compute time: a roofline over GEMMs, attention and memory-bound operators, with a launch floor.

Roofline: a kernel takes the longer of its FLOPs over the reachable FLOP/s and its bytes over the
reachable bandwidth. Model FLOPs, of which MFU is the rate, are counted here too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.compute.engine_operators import (
    MovedBytes,
    accumulated_bytes,
    attention_bytes,
    chunked_head,
    counts_operators,
    dropout_bytes,
    embedding_bytes,
    head_bytes,
    layer_bytes,
    layer_kernels,
    optimizer_bytes,
    stage_kernels,
)
from workbench.costmodel.compute.seam_bytes import seam_bytes
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.layer_gemms import (
    LayerGemm,
    attention_flops,
    head_flops,
    head_gemm,
    layer_flops,
    layer_gemms,
)
from workbench.costmodel.inputs.rank_workload import Workload, tensor_parallel_widths
from workbench.costmodel.memory.activation_memory import (
    has_weight_gradients,
    keeps_small_seams_eager,
    runs_fused_seam,
)
from workbench.costmodel.rates.constants import Constants
from workbench.machine.hardware import GPU
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS

KERNELS_PER_LAYER = {"eager": (36, 70), "compiled": (14, 26), "fused": (20, 40)}
"""Kernels of one layer (forward, backward) by the plan's `kernels`: of this engine's eager
modules, and textbook counts.
"""
FUSED_KERNELS_PER_LAYER = 12, 22
"""The same with fused or compiled seams: GEMMs, attention and one kernel per seam."""
ROUTING_KERNELS = 24, 30
"""Kernels (forward, backward) of a router, of dispatch and combine, beside those of experts."""
HOST_DISPATCH_KERNELS = 130, 180
"""The same of Megatron-core's all-to-all dispatcher, which sorts tokens by operators of its own and
copies counts to the host (recalled).
"""
CPP_CALL_SHARE = 0.25
"""Host time of a kernel that a loop in C++ launches, over one launched from Python."""
NARROW_HEAD_DIM = 100
"""Head dims below this do not fill the tiles of fused attention."""
GEMM_ALIGNMENT = 64
"""Dims that are multiples of this fill the tiles of a GEMM."""
LOSS_FORWARD_SHARE = 3 / 7
"""Share of the loss's memory traffic in forward: cast and log-softmax are three passes over the
logits, two gradients four.
"""


@dataclass(frozen=True)
class DeviceRates:
    """Best rates that a kernel can reach on one GPU."""

    flops: float
    """FLOP/s of layer GEMMs at the plan's precision."""
    flops_16bit: float
    """FLOP/s of attention and head, which stay in 16 bits where layer GEMMs are fp8."""
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
        if precision == "fp8"
        else dense
    )
    return DeviceRates(
        dense,
        wide,
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
    """Part of the forward behind the last tensor that it saves: its down-projection."""

    @property
    def recomputed(self) -> Number:
        """Seconds of recomputing what backward needs, and no more."""
        return self.forward - self.last_gemm


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer of each kind and of the head, per microbatch: what no pipeline or
    sharding changes.
    """

    dense: PassTimes
    moe: PassTimes
    attention: PassTimes
    head: PassTimes


@dataclass(frozen=True)
class MicrobatchCompute:
    """Compute seconds of one microbatch, by pipeline rank."""

    forward: Array
    backward: Array
    weight_grad: Array
    """Part of the backward that computes weight gradients (W)."""
    idle_forward: Array
    """Part of the forward in which the GPU waits for the host."""
    idle_backward: Array


def gemm_seconds(
    m: DeviceRates, rows: Number, columns: Number, inner: Number, element: int, narrow: bool = False
) -> Number:
    """Seconds of one GEMM [rows, inner] x [inner, columns], by the roofline.

    FLOP/s approach the reachable rate as 1 / (1 + half_dim (1/M + 1/N + 1/K)); dims that are no
    multiple of `GEMM_ALIGNMENT` fall back to smaller tiles.

    Args:
        m: Reachable rates.
        rows: M.
        columns: N.
        inner: K.
        element: Bytes per element of operands and result.
        narrow: Whether the GEMM runs in fp8.
    """
    c = m.constants
    rate = m.flops * c.narrow_share if narrow else m.flops_16bit * c.gemm_share
    # Short dims leave tiles and the last wave of thread blocks partly empty.
    shortness = 1 + c.gemm_half_dim * (1 / rows + 1 / columns + 1 / inner)
    misaligned = (columns % GEMM_ALIGNMENT != 0) | (inner % GEMM_ALIGNMENT != 0)
    math = 2 * rows * columns * inner / rate * shortness * (1 + c.gemm_misaligned * misaligned)
    memory = (rows * columns + rows * inner + columns * inner) * element / m.bandwidth
    return np.maximum(math, memory)


def layer_times(w: Workload, m: DeviceRates) -> LayerTimes:
    """Seconds of one layer of each kind and of the head."""
    dense = layer_pass(w, m, False)
    moe = layer_pass(w, m, True) if w.shape.moe else dense
    return LayerTimes(dense, moe, attention_pass(w, m), head_pass(w, m))


def microbatch_compute(w: Workload, m: DeviceRates, k: LayerTimes) -> MicrobatchCompute:
    """Compute seconds of one microbatch on each pipeline rank, recomputation included."""
    sparse = w.layers - w.dense_layers
    looked_up, scattered = _embedding_seconds(w, m)
    forward = w.dense_layers * k.dense.forward + w.has_head * k.head.forward + looked_up
    backward = w.dense_layers * k.dense.backward + w.has_head * k.head.backward + scattered
    if w.shape.moe:
        forward = forward + sparse * k.moe.forward
        backward = backward + sparse * k.moe.backward
    backward = backward + _accumulation_seconds(w, m)
    # Selective recompute repeats attention, or the share of a layer's forward that the framework's
    # profile states; full recompute repeats the layer.
    share = w.fixed.framework.selective_recompute_share
    selective = k.attention.forward if share < 0 else share * k.moe.forward
    whole = k.moe.forward if w.fixed.framework.recompute_full_layer else k.moe.recomputed
    recompute = w.recomputed_layers * whole + w.layers * (w.searched.selective * selective)
    weight = (
        w.dense_layers * k.dense.weight_grad
        + sparse * k.moe.weight_grad
        + w.has_head * k.head.weight_grad
    )
    idle = [
        np.asarray(w.dense_layers * a + sparse * b)
        for a, b in (
            (k.dense.idle_forward, k.moe.idle_forward),
            (k.dense.idle_backward, k.moe.idle_backward),
        )
    ]
    backward = backward + recompute
    if counts_operators(w):
        gemms = [len(layer_gemms(w, kind)) for kind in (False, True)]
        host = [1e-6 * m.constants.launch_us * each for each in stage_kernels(w, *gemms)]
        forward, idle[0] = _host_ahead(forward - idle[0], host[0])
        repeated = w.recomputed_layers * k.moe.idle_forward
        backward, idle[1] = _host_ahead(backward - repeated - idle[1], host[1])
    return MicrobatchCompute(forward, backward, np.asarray(weight), *idle)


def _host_ahead(gpu: Array, host: Number) -> tuple[Array, Array]:
    """(seconds of a stage, those of them in which its GPU waits for the host), which gets ahead
    while large kernels run and falls behind in small ones.
    """
    seconds = np.maximum(gpu, host)
    return seconds, seconds - gpu


def _embedding_seconds(w: Workload, m: DeviceRates) -> tuple[Number, Number]:
    """Seconds of the embedding's lookup and of its gradient."""
    if counts_operators(w):
        looked_up, scattered = _counted_seconds(m, embedding_bytes(w))
        return w.has_embedding * looked_up, w.has_embedding * scattered
    embedding = w.has_embedding * (4 / m.bandwidth * w.hidden_activation_bytes)
    return embedding, embedding


def _accumulation_seconds(w: Workload, m: DeviceRates) -> Number:
    """Seconds in which a microbatch's gradients are added to those before."""
    if counts_operators(w):
        return _counted_seconds(m, MovedBytes(backward=accumulated_bytes(w)))[1]
    # With several microbatches, gradients are accumulated: read, added to and written.
    # A GEMM that adds to them itself reads and writes them only.
    passed = w.element_bytes * (1 - w.fixed.behavior.fused_accumulation)
    return w.param_counts.trained * (
        (2 * w.stored_gradient_bytes + passed) / m.bandwidth * (w.microbatches > 1)
    )


def model_flops(w: Workload) -> Number:
    """Model FLOPs of one microbatch of every replica, on one tensor and context rank: MFU's
    numerator.

    Forward and backward of the whole model, causal attention counted half, nothing recomputed
    (PaLM, 2204.02311). Frozen weights have no weight gradients; padding is no work.
    """
    w = replace(w, **tensor_parallel_widths(w.shape, w.tiling.column_parts, padded=False))
    sparse, passes = w.layers - w.dense_layers, 2 + float(w.fixed.adapter_rank == 0)
    gemms = (
        w.dense_layers * layer_flops(w, False)
        + sparse * layer_flops(w, True)
        + w.has_head * head_flops(w)
    )
    each = passes * gemms + 3 * w.layers * attention_flops(w)
    flops: Number = (w.rank_multiplicity * w.data * each).sum(axis=0)
    return flops


def layer_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """Seconds of one layer and microbatch.

    Args:
        w: Per-rank problem sizes.
        m: Reachable rates.
        is_moe: Whether the feed-forward is an MoE, whose experts run as a grouped GEMM.
    """
    gemms, attention = _gemm_pass(w, m, is_moe), attention_pass(w, m)
    bound, slowdown = memory_bound_pass(w, m, is_moe), m.constants.compute_slowdown
    forward = slowdown * (gemms.forward + attention.forward + bound.forward)
    backward = slowdown * (gemms.backward + attention.backward + bound.backward)
    launches = _kernel_launches(w, is_moe)
    forward_end, backward_end = (
        _with_launch_floor(m, seconds, n) for seconds, n in zip((forward, backward), launches)
    )
    # What launches add to a GPU whose host runs ahead is idle time that communication can use.
    idles = float(m.host_runs_ahead)
    return PassTimes(
        forward_end,
        backward_end,
        slowdown * gemms.weight_grad,
        idles * (forward_end - forward),
        idles * (backward_end - backward),
        slowdown * gemms.last_gemm,
    )


def _gemm_seconds(p: LayerGemm, w: Workload, m: DeviceRates) -> Number:
    """Seconds of all GEMMs of one kind in forward."""
    e, narrow = w.element_bytes, w.fixed.precision == "fp8"
    if p.upcast and e < w.upcast_bytes:
        wide = replace(m, flops_16bit=peak_flops(w.fixed.gpu, "fp32"))
        return p.count * gemm_seconds(wide, p.rows, p.columns, p.inner, w.upcast_bytes)
    return p.count * gemm_seconds(m, p.rows, p.columns, p.inner, e, narrow)


def _gemm_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """Seconds of one layer's GEMMs; the backward of a GEMM is two, for input and weight."""
    gemms = layer_gemms(w, is_moe)
    each = [_gemm_seconds(p, w, m) for p in gemms]
    forward: Number = sum(each)
    weight_grad = has_weight_gradients(w) * sum(
        _gemm_seconds(replace(p, rows=p.columns, columns=p.inner, inner=p.rows), w, m)
        for p in gemms
    )
    backward = weight_grad + sum(
        _gemm_seconds(replace(p, columns=p.inner, inner=p.columns), w, m) for p in gemms
    )
    # The output of an expert's is saved: combine's gradient needs it.
    last = 0.0 if is_moe and w.shape.moe else each[-1]
    return PassTimes(forward, backward, weight_grad, last_gemm=last)


def _kernel_launches(w: Workload, is_moe: bool) -> tuple[Number, Number]:
    """Kernels of one layer (forward, backward), counting seams that run fused and those left
    eager.
    """
    if counts_operators(w):
        return layer_kernels(w, is_moe, len(layer_gemms(w, is_moe)))
    routed = routing_launches(w) if is_moe and w.shape.moe else (0.0, 0.0)
    if not w.uses_fused_kernels:
        plain = KERNELS_PER_LAYER[w.fixed.kernels]
        return plain[0] + routed[0], plain[1] + routed[1]
    norm, rope, activation = _fused_seams(w, is_moe)
    seams = [norm, activation, *([rope] if w.shape.positions == "rope" else [])]
    share = sum(seams) / len(seams)
    each = [
        eager + (fused - eager) * share + more
        for fused, eager, more in zip(FUSED_KERNELS_PER_LAYER, KERNELS_PER_LAYER["eager"], routed)
    ]
    return each[0], each[1]


def routing_launches(w: Workload) -> tuple[Number, Number]:
    """Kernels (forward, backward) that an MoE adds to a layer: router, dispatch and combine, and
    the GEMMs of each local expert where they are calls of their own, in a loop of C++.
    """
    moe, b = w.shape.moe, w.fixed.behavior
    if moe is None:
        return 0.0, 0.0
    counts = b.dispatches_from_host and moe.capacity is None
    router = HOST_DISPATCH_KERNELS if counts else ROUTING_KERNELS
    calls = (1 - b.grouped_kernel) * moe.experts / w.searched.expert * CPP_CALL_SHARE
    return router[0] + 2 * calls, router[1] + 4 * calls


def _fused_seams(w: Workload, is_moe: bool) -> tuple[Number, Number, Number]:
    """1 or 0 for norms, rotary positions and the activation: whether each runs fused
    (`kernels/fused_seams.py`).
    """
    wide = (
        w.routed_rows_per_token * w.expert_ffn + w.shared_ffn if is_moe and w.shape.moe else w.ffn
    )
    sizes = w.hidden_per_rank / w.sequence_parallel, w.q_width, wide
    kinds = w.shape.norm, "rope", w.shape.mlp
    allowed = [1.0 - (keeps_small_seams_eager(w) and kind in ATEN_SEAMS) for kind in kinds]
    norm, rope, activation = (
        fused * runs_fused_seam(w, w.tokens * size) for fused, size in zip(allowed, sizes)
    )
    return norm, rope, activation


def _with_launch_floor(m: DeviceRates, seconds: Number, kernels: Number) -> Number:
    """Seconds with launches: the slower of host and GPU if the host runs ahead, else their sum."""
    host = 1e-6 * m.constants.launch_us * kernels
    return np.maximum(seconds, host) if m.host_runs_ahead else seconds + host


def attention_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of causal attention in one layer, fused or not as the framework profile or the plan
    says.
    """
    head_dim, framework = w.shape.head_dim or 128, w.fixed.framework
    scores = w.heads * w.tokens * w.fixed.sequence_length
    if w.fixed.attention == "math":  # which upcasts its operands: twice the bytes, fp32 GEMMs
        slower = m.flops_16bit / (w.fixed.gpu.tflops["fp32"] * 1e12)
        return unfused_attention(m, attention_flops(w) * slower, head_dim, 2 * scores, 0.0)
    if not framework.unfused:
        passes = fused_attention(m, attention_flops(w), head_dim, _attended_length(w))
        return _with_copies(passes, attention_bytes(w), m) if counts_operators(w) else passes
    return unfused_attention(m, attention_flops(w), head_dim, scores, framework.dropout)


def _attended_length(w: Workload) -> Number:
    """Tokens of a sequence that one call of an attention kernel sees: a ring's rank attends to the
    blocks of its peers one by one.
    """
    return w.fixed.sequence_length / w.ring


def _counted_seconds(m: DeviceRates, moved: MovedBytes) -> tuple[Number, Number]:
    """Seconds (forward, backward) of operators whose bytes are counted."""
    each = m.constants.plain_traffic / m.bandwidth
    return each * moved.forward, each * moved.backward


def _with_copies(passes: PassTimes, moved: MovedBytes, m: DeviceRates) -> PassTimes:
    """Attention, and what is copied around it."""
    forward, backward = _counted_seconds(m, moved)
    return PassTimes(passes.forward + forward, passes.backward + backward)


def fused_attention(m: DeviceRates, flops: Number, head_dim: int, length: Number) -> PassTimes:
    """Seconds of FlashAttention-2, whose backward does 2.5 times the FLOPs of forward (2307.08691).

    Args:
        m: The GPU.
        flops: Forward FLOPs of the causal half.
        head_dim: Width of a head.
        length: Tokens of a sequence; short ones leave thread blocks without work.
    """
    c = m.constants
    rate = (
        m.flops_16bit
        * c.attention_share
        * (c.attention_narrow if head_dim < NARROW_HEAD_DIM else 1.0)
        / (1 + c.attention_half_length / length)
    )
    forward = flops / rate
    return PassTimes(forward, 2.5 * forward / c.attention_backward)


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
    gemms = 2 * flops / rate
    return PassTimes(gemms + (4 + 5 * dropout) * moved, 2 * gemms + (6 + 5 * dropout) * moved)


def memory_bound_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """Seconds of norms, residuals, rotary positions and activation of one layer, by bytes moved."""
    if counts_operators(w):
        return _counted_pass(w, m, is_moe)
    h, half = w.hidden_per_rank / w.sequence_parallel, w.element_bytes / 2
    drop = 4 * w.fixed.framework.dropout * h
    if w.fixed.dropout:
        drop = drop + 2 * m.constants.dropout_bytes / half * h
    # An MoE activates every routed row, and copies tokens for dispatch and combine.
    inputs, wide = _gemm_inputs(w, is_moe)
    other = m.constants.plain_traffic
    copies = other * (drop + 8 * (inputs - 2 * h))
    rotated = w.q_width + w.k_width if w.shape.positions == "rope" else 0.0
    forward, backward = (
        2 * h * norm + rotated * rope + wide * activation + copies
        for norm, rope, activation in _seam_passes(w, m.constants, is_moe)
    )
    if w.fixed.precision == "fp8":
        forward, backward = (
            bound + other * cast
            for bound, cast in zip((forward, backward), _quantized_bytes(w, inputs, wide))
        )
    rate = m.bandwidth / (w.tokens * half)
    return PassTimes(forward / rate, backward / rate)


def _seam_passes(w: Workload, c: Constants, is_moe: bool) -> list[tuple[Number, Number, Number]]:
    """Bytes an element of (norm and residual, rotary positions, activation), forward and backward.

    Small activations of this engine leave fused seams eager (`kernels/fused_seams.py`).
    """
    single = bool(w.fixed.behavior.single_norm)
    fused, plain = seam_bytes(c.counted_kernels, single), seam_bytes("eager", single)
    shares: tuple[Number, Number, Number] = (1.0, 1.0, 1.0)
    if keeps_small_seams_eager(w):
        shares = _fused_seams(w, is_moe)
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


def _gemm_inputs(w: Workload, is_moe: bool) -> tuple[Number, Number]:
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


def _counted_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """The same of this engine's operators, counted one by one; the casts of fp8 stay textbook."""
    moved = layer_bytes(w, is_moe)
    dropped = dropout_bytes(w, m.constants.dropout_bytes)
    moved += MovedBytes(dropped, dropped)
    if w.fixed.precision == "fp8":
        casts = _quantized_bytes(w, *_gemm_inputs(w, is_moe))
        moved += MovedBytes(*(w.tokens * cast for cast in casts))
    return PassTimes(*_counted_seconds(m, moved))


def _quantized_bytes(w: Workload, inputs: Number, wide: Number) -> tuple[Number, Number]:
    """Bytes per token (forward, backward) that quantizing the operands of fp8 GEMMs moves: 16 bits
    read, and 8 written in both orders.

    Norms and activations that write fp8 themselves leave attention's output in forward, and in
    backward the output gradients of all but the gate's GEMM.
    """
    h, out = w.hidden_per_rank / w.sequence_parallel, w.q_width + w.k_width + w.v_width
    fused = w.fixed.behavior.fused_quantization
    apart = 4 * (inputs + wide)
    forward = fused * 4 * w.o_width + (1 - fused) * apart
    backward = fused * 4 * (2 * h + out) + (1 - fused) * apart
    return forward, backward


def head_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of the output projection and the cross-entropy loss."""
    if counts_operators(w):
        return _counted_head_pass(w, m)
    p = head_gemm(w)
    t, v, h, n = p.rows, p.columns, p.inner, p.count
    loss = w.tokens * v * (w.upcast_bytes / 4 * m.constants.loss_bytes / m.bandwidth)
    forward = n * gemm_seconds(m, t, v, h, w.element_bytes) + LOSS_FORWARD_SHARE * loss
    weight = n * gemm_seconds(m, v, h, t, w.element_bytes) * has_weight_gradients(w)
    backward = (
        weight + n * gemm_seconds(m, t, h, v, w.element_bytes) + (1 - LOSS_FORWARD_SHARE) * loss
    )
    slowdown = m.constants.compute_slowdown
    return PassTimes(slowdown * forward, slowdown * backward, slowdown * weight)


def _counted_head_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """The same of this engine's operators: a fused head that is not split over ranks computes
    logits and both gradients chunk by chunk in forward.
    """
    p, (loss, loss_backward) = head_gemm(w), _counted_seconds(m, head_bytes(w))
    v, h, t, e = p.columns, p.inner, chunked_head(w, p.rows), w.element_bytes
    n, in_forward = p.count * p.rows / t, w.uses_fused_kernels * (w.tensor == 1)
    weight = n * gemm_seconds(m, v, h, t, e) * has_weight_gradients(w)
    gradients = weight + n * gemm_seconds(m, t, h, v, e)
    forward = n * gemm_seconds(m, t, v, h, e) + in_forward * gradients
    forward = forward + loss
    backward = (1 - in_forward) * gradients + loss_backward
    slowdown = m.constants.compute_slowdown
    return PassTimes(slowdown * forward, slowdown * backward, slowdown * (1 - in_forward) * weight)


def optimizer_seconds(w: Workload, m: DeviceRates, owned: Array) -> Array:
    """Seconds of the optimizer step and the gradient norm: bytes of optimizer states over
    bandwidth.

    Every state is read and written once, the gradient read twice.

    Args:
        w: Per-rank problem sizes.
        m: Reachable rates.
        owned: Parameters whose optimizer states the rank holds.
    """
    states = w.fixed.moment_bytes + (w.fixed.master_bytes or w.element_bytes)
    if counts_operators(w):
        traffic = np.asarray(optimizer_bytes(w, owned))
    else:
        traffic = owned * (2 * states + 2 * w.gradient_element_bytes + w.element_bytes)
    # Offloaded optimizer states are updated by the host's CPUs (ZeRO-Offload, 2101.06840).
    host = m.constants.host_gbs * 1e9
    bandwidth = m.bandwidth + (host - m.bandwidth) * w.searched.offload_optimizer
    return traffic / bandwidth
