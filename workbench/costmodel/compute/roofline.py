"""Compute time: a roofline over GEMMs, attention and memory-bound operators, with a launch floor.

Roofline: a kernel takes the longer of its FLOPs over the reachable FLOP/s and its bytes over the
reachable bandwidth. Model FLOPs, of which MFU is the rate, are counted here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.costmodel.compute.engine_traffic.engine_kernels import stage_kernels
from workbench.costmodel.compute.engine_traffic.engine_operators import (
    accumulated_bytes,
    attention_bytes,
    chunked_head,
    counts_operators,
    embedding_bytes,
    head_bytes,
    host_step_bytes,
    optimizer_bytes,
)
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes
from workbench.costmodel.compute.frozen_layers import frozen_gemm_pass
from workbench.costmodel.compute.gemm_passes import accumulated_result_bytes, gemm_pass
from workbench.costmodel.compute.kernel_launches import (
    kernel_launches,
    replayed_kernels,
    with_launch_floor,
)
from workbench.costmodel.compute.kernel_rates import (
    DeviceRates,
    PassTimes,
    fused_attention,
    gemm_seconds,
    peak_flops,
    unfused_attention,
)
from workbench.costmodel.compute.memory_bound import counted_seconds, memory_bound_pass
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, adapted_layers, kinds_of_layers
from workbench.costmodel.inputs.config import Array, FixedConfig, Number
from workbench.costmodel.inputs.layer_gemms import (
    attention_flops,
    head_flops,
    head_gemm,
    layer_flops,
    prediction_gemm,
)
from workbench.costmodel.inputs.rank_workload import Workload, tensor_parallel_widths
from workbench.costmodel.memory.activation_memory import has_weight_gradients
from workbench.costmodel.rates.constants import Constants

NO_TIME = PassTimes(0.0, 0.0)
LOSS_FORWARD_SHARE = 3 / 7
"""Share of the loss's memory traffic in forward: cast and log-softmax are three passes over the
logits, two gradients four.
"""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer of each kind and of the head, per microbatch: what no pipeline or
    sharding changes.
    """

    dense: PassTimes
    moe: PassTimes
    attention: PassTimes
    head: PassTimes
    frozen: Mapping[AdaptedLayer, PassTimes] = field(default_factory=dict)
    """By kind of layer beside adapters, where these alone are trained; `dense` and `moe` are the
    kinds of layers without them.
    """

    def by_kind(self, w: Workload) -> list[tuple[PassTimes, Array]]:
        """A layer of each kind of a workload, with how many each pipeline rank has."""
        if w.fixed.adapter_rank:
            return [(self.frozen[kind], count) for kind, count in adapted_layers(w)]
        return [(self.dense, w.dense_layers), (self.moe, w.layers - w.dense_layers)]

    def repeated(self, w: Workload, of: str) -> Number:
        """What recomputing a layer repeats of a field of its times: of those with adapters, the
        mean of the layers that have a backward.
        """
        if not w.fixed.adapter_rank:
            one: Number = getattr(self.moe, of)
            return one
        kinds = [(kind, count) for kind, count in adapted_layers(w) if kind.has_backward]
        layers = sum((count for _, count in kinds), w.zeros)
        total = sum((count * getattr(self.frozen[kind], of) for kind, count in kinds), w.zeros)
        return np.asarray(total / np.maximum(layers, 1))


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


def layer_times(w: Workload, m: DeviceRates) -> LayerTimes:
    """Seconds of one layer of each kind and of the head."""
    attention, head = attention_pass(w, m), head_pass(w, m)
    if w.fixed.adapter_rank:
        frozen = {kind: layer_pass(w, m, kind.is_moe, kind) for kind in kinds_of_layers(w.fixed)}
        return LayerTimes(NO_TIME, NO_TIME, attention, head, frozen)
    dense = layer_pass(w, m, False)
    moe = layer_pass(w, m, True) if w.shape.moe else dense
    return LayerTimes(dense, moe, attention, head)


def microbatch_compute(w: Workload, m: DeviceRates, k: LayerTimes) -> MicrobatchCompute:
    """Compute seconds of one microbatch on each pipeline rank, recomputation included."""
    kinds, zeros = k.by_kind(w), w.zeros
    looked_up, scattered = _embedding_seconds(w, m)
    forward = sum((n * x.forward for x, n in kinds), w.has_head * k.head.forward + looked_up)
    backward = sum((n * x.backward for x, n in kinds), w.has_head * k.head.backward + scattered)
    backward = backward + accumulation_seconds(w, m)
    repeated = _recompute_seconds(w, k)
    weight = sum((n * x.weight_grad for x, n in kinds), w.has_head * k.head.weight_grad)
    idle = [
        sum((n * x.idle_forward for x, n in kinds), zeros),
        sum((n * x.idle_backward for x, n in kinds), zeros),
    ]
    backward = backward + repeated
    if counts_operators(w):
        host = [1e-6 * m.constants.launch_us * each for each in stage_kernels(w)]
        forward, idle[0] = host_ahead(forward - idle[0], host[0])
        again = w.recomputed_layers * k.repeated(w, "idle_forward")
        backward, idle[1] = host_ahead(backward - again - idle[1], host[1])
    return MicrobatchCompute(forward, backward, np.asarray(weight), *idle)


def _recompute_seconds(w: Workload, k: LayerTimes) -> Array:
    """Seconds of recomputation in one microbatch's backward, by pipeline rank. Selective recompute
    repeats attention, or the share of a layer's forward that the framework's profile states; full
    recompute repeats the layer.
    """
    behavior = w.fixed.framework.recompute
    forward, recomputed = (k.repeated(w, of) for of in ("forward", "recomputed"))
    share = behavior.repeated_share
    selective = k.attention.recomputed if share is None else share * forward
    whole = forward if behavior.whole_layers else recomputed
    return np.asarray(w.recomputed_layers * whole + w.layers * (w.searched.selective * selective))


def host_ahead(gpu: Array, host: Number) -> tuple[Array, Array]:
    """(seconds of a stage, those of them in which its GPU waits for the host), which gets ahead
    while large kernels run and falls behind in small ones.
    """
    seconds = np.maximum(gpu, host)
    return seconds, seconds - gpu


def _embedding_seconds(w: Workload, m: DeviceRates) -> tuple[Number, Number]:
    """Seconds of the embedding's lookup and of its gradient."""
    trained = w.has_embedding * has_weight_gradients(w)
    if counts_operators(w):
        looked_up, scattered = counted_seconds(m, embedding_bytes(w))
        return w.has_embedding * looked_up, trained * scattered
    embedding = 4 / m.bandwidth * w.hidden_activation_bytes
    return w.has_embedding * embedding, trained * embedding


def accumulation_seconds(w: Workload, m: DeviceRates) -> Number:
    """Seconds in which a microbatch's gradients are added to those before."""
    if counts_operators(w):
        return counted_seconds(m, MovedBytes(backward=accumulated_bytes(w)))[1]
    # With several microbatches, gradients are accumulated: read, added to and written, where the
    # framework keeps a buffer for it in that. Of GEMMs that add to them themselves, the
    # embedding's lookup is left.
    apart = w.param_counts.trained
    if not w.fixed.framework.model_states.separate_gradient:
        apart = w.has_embedding * w.table_params * has_weight_gradients(w)
    stored = w.fixed.gradient_accumulator_bytes or w.stored_gradient_bytes
    moved = 2 * stored + w.element_bytes
    return apart * (moved / m.bandwidth * (w.microbatches > 1))


def model_flops(w: Workload) -> Number:
    """Model FLOPs of one microbatch of every replica, on one tensor and context rank: MFU's
    numerator.

    Forward and backward of the whole model, causal attention counted half, nothing recomputed
    (PaLM, 2204.02311). Frozen weights have no weight gradients; padding is no work.
    """
    parts, split = w.tiling.column_parts, w.fixed.expert_tensor
    w = replace(w, **tensor_parallel_widths(w.shape, parts, split, padded=False))
    sparse, passes = w.layers - w.dense_layers, 2 + float(w.fixed.adapter_rank == 0)
    gemms = (
        w.dense_layers * layer_flops(w, False)
        + sparse * layer_flops(w, True)
        + w.has_head * head_flops(w)
        + w.has_head * w.shape.mtp_layers * (head_flops(w) + prediction_gemm(w).flops)
    )
    each = passes * gemms + 3 * w.layers * attention_flops(w)
    flops: Number = (w.rank_multiplicity * w.busy_replicas * each).sum(axis=0)
    return flops


def layer_pass(
    w: Workload, m: DeviceRates, is_moe: bool, frozen: AdaptedLayer | None = None
) -> PassTimes:
    """Seconds of one layer and microbatch.

    Args:
        w: Per-rank problem sizes.
        m: Reachable rates.
        is_moe: Whether the feed-forward is an MoE, whose experts run as a grouped GEMM.
        frozen: Its kind where its weights are frozen beside adapters.
    """
    attention, bound = attention_pass(w, m), memory_bound_pass(w, m, is_moe, frozen)
    if frozen is None:
        gemms = gemm_pass(w, m, is_moe)
    else:
        gemms = frozen_gemm_pass(w, m, frozen)
        attended = float(frozen.has_attention_backward)
        attention = replace(attention, backward=attended * attention.backward)
    slowdown = m.constants.compute_slowdown
    forward = slowdown * (gemms.forward + attention.forward + bound.forward)
    backward = slowdown * (gemms.backward + attention.backward + bound.backward)
    launches = kernel_launches(w, is_moe, frozen)
    replayed = replayed_kernels(w, is_moe, launches)
    forward_end, backward_end = (
        with_launch_floor(m, seconds, n, without_host)
        for seconds, n, without_host in zip((forward, backward), launches, replayed)
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


def attention_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of causal attention in one layer, fused or not as the framework profile or the plan
    says.
    """
    head_dim = _attended_width(w)
    scores = w.heads * w.tokens * w.fixed.sequence_length
    if w.fixed.attention == "math" and counts_operators(w):
        return _with_copies(_math_attention(w, m), attention_bytes(w), m)
    if w.fixed.attention == "math":  # which upcasts its operands: twice the bytes, fp32 GEMMs
        slower = m.flops_16bit / (w.fixed.gpu.tflops["fp32"] * 1e12)
        return unfused_attention(m, attention_flops(w) * slower, head_dim, 2 * scores, 0.0)
    if w.fixed.framework.kernels.fused_attention:
        passes = fused_attention(m, attention_flops(w), head_dim, _attended_length(w))
        return _with_copies(passes, attention_bytes(w), m) if counts_operators(w) else passes
    dropout = w.fixed.framework.saved_tensors.dropout_masks
    return unfused_attention(m, attention_flops(w), head_dim, scores, dropout)


def _attended_width(w: Workload) -> int:
    """Width of a head in the products of one score; that of QK^T and of PV on average in MLA, where
    they differ.
    """
    mla = w.shape.mla
    if mla is None:
        return w.shape.head_dim or 128
    return (mla.nope_dim + mla.rope_dim + mla.value_dim) // 2


def _math_attention(w: Workload, m: DeviceRates) -> PassTimes:
    """GEMMs of attention in plain operators, over the whole square of scores, in fp32 or better."""
    length, head_dim = w.fixed.sequence_length, w.shape.head_dim or 128
    if w.element_bytes < w.upcast_bytes:
        m = replace(m, flops_16bit=peak_flops(w.fixed.gpu, "fp32"))
    count = w.heads * w.tokens / length
    scores = count * gemm_seconds(m, length, length, head_dim, w.upcast_bytes)
    weighted = count * gemm_seconds(m, length, head_dim, length, w.upcast_bytes)
    return PassTimes(scores + weighted, scores + 3 * weighted, last_gemm=weighted)


def _attended_length(w: Workload) -> Number:
    """Tokens of a sequence that one call of an attention kernel sees: a ring's rank attends to the
    blocks of its peers one by one.
    """
    return w.fixed.sequence_length / w.ring


def _with_copies(passes: PassTimes, moved: MovedBytes, m: DeviceRates) -> PassTimes:
    """Attention, and what is copied around it."""
    forward, backward = counted_seconds(m, moved)
    return replace(passes, forward=passes.forward + forward, backward=passes.backward + backward)


def head_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of the output projection and the cross-entropy loss, once more for every further
    token that the model predicts.
    """
    one = _counted_head_pass(w, m) if counts_operators(w) else _one_head_pass(w, m)
    if not w.shape.mtp_layers:
        return one
    further, more = _further_prediction(w, m), w.shape.mtp_layers
    return PassTimes(
        one.forward + more * (one.forward + further.forward),
        one.backward + more * (one.backward + further.backward),
        one.weight_grad + more * (one.weight_grad + further.weight_grad),
    )


def _further_prediction(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of what a layer that predicts a further token has beside its block and the head: the
    embedding's lookup and its gradient, and the projection of both, in 16 bits as the head is.
    """
    p, lookup = prediction_gemm(w), 4 / m.bandwidth * w.hidden_activation_bytes
    rows, columns, inner, e = p.rows, p.columns, p.inner, w.element_bytes
    slowdown = m.constants.compute_slowdown
    weight = gemm_seconds(m, columns, inner, rows, e, result=accumulated_result_bytes(w))
    weight = weight * has_weight_gradients(w)
    forward = gemm_seconds(m, rows, columns, inner, e) + lookup
    backward = weight + gemm_seconds(m, rows, inner, columns, e) + lookup
    return PassTimes(slowdown * forward, slowdown * backward, slowdown * weight)


def _one_head_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """Seconds of the output projection and the cross-entropy loss."""
    p = head_gemm(w)
    t, v, h, n = p.rows, p.columns, p.inner, p.count
    loss = w.tokens * v * (w.upcast_bytes / 4 * m.constants.loss_bytes / m.bandwidth)
    logits = n * gemm_seconds(m, t, v, h, w.element_bytes)
    weight = n * gemm_seconds(m, v, h, t, w.element_bytes, result=accumulated_result_bytes(w))
    weight = weight * has_weight_gradients(w)
    gradients = weight + n * gemm_seconds(m, t, h, v, w.element_bytes)
    in_forward = float(w.fixed.framework.loss.kind == "fused_linear")
    share = LOSS_FORWARD_SHARE + in_forward * (1 - LOSS_FORWARD_SHARE)
    forward = logits + share * loss + in_forward * gradients
    backward = (1 - in_forward) * gradients + (1 - share) * loss
    slowdown = m.constants.compute_slowdown
    return PassTimes(slowdown * forward, slowdown * backward, slowdown * (1 - in_forward) * weight)


def _counted_head_pass(w: Workload, m: DeviceRates) -> PassTimes:
    """The same of this engine's operators: a fused head that is not split over ranks computes
    logits and both gradients chunk by chunk in forward; of pairs logits again in backward, where
    a token's factor is known.
    """
    p, (loss, loss_backward) = head_gemm(w), counted_seconds(m, head_bytes(w))
    v, h, t, e = p.columns, p.inner, chunked_head(w, p.rows), w.element_bytes
    n, chunked = p.count * p.rows / t, 1.0 * w.fuses_head
    in_forward = chunked * (not w.fixed.has_pairs)
    weight = n * gemm_seconds(m, v, h, t, e) * has_weight_gradients(w)
    gradients = weight + n * gemm_seconds(m, t, h, v, e)
    logits = n * gemm_seconds(m, t, v, h, e)
    forward = logits + in_forward * gradients + loss
    backward = (1 - in_forward) * gradients + (chunked - in_forward) * logits + loss_backward
    slowdown = m.constants.compute_slowdown
    return PassTimes(slowdown * forward, slowdown * backward, slowdown * (1 - in_forward) * weight)


UPCAST_MOMENT_TRAFFIC = (2 + 4) + (4 - 2) * 2 + (4 + 2) + (2 + 2)
"""Bytes moved of a 16-bit moment beyond its own read and write, where a step upcasts it: to fp32,
read and written as such, and copied back by way of 16 bits (Transformer Engine
pytorch/optimizers/fused_adam.py, get_unscaled_state and _apply_scale).
"""


def _upcast_moment_traffic(w: Workload) -> float:
    """Bytes a parameter that upcasting its moments moves."""
    states = w.fixed.framework.model_states
    return UPCAST_MOMENT_TRAFFIC * w.fixed.narrow_moments * states.upcasts_moments


def _step_traffic(w: Workload) -> Number:
    """Bytes that a step moves of a parameter whose states the rank holds: as the framework's
    documents count them, else every state is read and written once, the gradient read twice.
    """
    documented = w.fixed.framework.model_states.step_traffic
    if documented is not None and w.element_bytes < 4 and w.fixed.moment_bytes == 8:
        return documented
    states = w.fixed.moment_bytes + (w.fixed.master_bytes or w.element_bytes)
    once: Number = 2 * states + 2 * w.gradient_element_bytes + w.element_bytes
    return once + _upcast_moment_traffic(w)


def _bucket_traffic(w: Workload) -> Number:
    """Bytes that gradients move on their way into buckets and back, once a step."""
    moved = w.fixed.framework.model_states.bucket_traffic * float(w.element_bytes < 4)
    return w.param_counts.trained * moved


def host_gbs(s: FixedConfig, c: Constants) -> float:
    """Host memory bandwidth that a rank reaches, GB/s: that of a calibration; else, of a framework
    that binds each to its GPU's socket, its share of the node's, at most a socket's; of others that
    of a full node.
    """
    if c.measured_host_gbs is not None:
        return c.measured_host_gbs
    if not s.framework.data_parallel.stages_offload or s.gpu.device == "cpu":
        return c.host_gbs
    ranks = min(s.world_size, s.gpus_per_node)
    if s.fabric.host_gbs is None:
        return min(c.host_socket_gbs, c.host_gbs * max(1.0, GPUS_OF_A_NODE / ranks))
    return c.host_share * s.fabric.host_gbs / max(ranks, min(SOCKETS, s.fabric.gpus_per_node))


SOCKETS = 2
"""Of a host of several GPUs."""
GPUS_OF_A_NODE = 8
"""Of the servers whose memory bandwidth the constant `host_gbs` is a share of."""


def optimizer_seconds(w: Workload, m: DeviceRates, owned: Array) -> Array:
    """Seconds of the optimizer step and the gradient norm: bytes of optimizer states over
    bandwidth.

    Args:
        w: Per-rank problem sizes.
        m: Reachable rates.
        owned: Parameters whose optimizer states the rank holds.
    """
    if counts_operators(w):
        traffic, on_host = np.asarray(optimizer_bytes(w, owned)), host_step_bytes(w, owned)
    else:
        traffic = on_host = owned * _step_traffic(w) + _bucket_traffic(w)
    # The host's CPUs update offloaded states (ZeRO-Offload, 2101.06840), the device the rest beside
    # them.
    share, host = w.searched.offload_optimizer, 1e9 * host_gbs(w.fixed, m.constants)
    if w.fixed.offloads_to_disk:  # read and written while others are stepped
        host = min(host, 1e9 * m.constants.disk_gbs)
    return np.asarray(np.maximum(share * on_host / host, (1 - share) * traffic / m.bandwidth))
