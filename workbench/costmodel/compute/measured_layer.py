"""Compute of a CPU rank as the sum of its measured operators.

A layer is its linear layers, norms, rotation, attention and activation, each at its own size, and
what the host does between them: the rest of a tiny model's step, in which sizes do not matter.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.compute.frozen_gemms import frozen_gemms
from workbench.costmodel.compute.frozen_layers import adapter_bytes
from workbench.costmodel.compute.kernel_rates import DeviceRates, PassTimes
from workbench.costmodel.compute.measured_seams import (
    host_costs,
    measured_attention,
    measured_or_eager,
    measured_routing,
    measured_seam,
)
from workbench.costmodel.compute.memory_bound import counted_seconds
from workbench.costmodel.compute.operator_seconds import operator_microbatch_compute
from workbench.costmodel.compute.roofline import (
    NO_TIME,
    LayerTimes,
    MicrobatchCompute,
    layer_times,
    microbatch_compute,
    optimizer_seconds,
)
from workbench.costmodel.compute.traced_seconds import traced_microbatch_compute
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, kinds_of_layers
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm, head_gemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_weight_gradients
from workbench.costmodel.rates.measured_operators import MeasuredOperators, OperatorTimes


def measured_layer_times(w: Workload, m: DeviceRates) -> LayerTimes:
    """Seconds of one layer of each kind and of the head: measured ones, or by the roofline."""
    o = m.constants.measured
    if w.fixed.traced is not None:  # a graph has no layers
        return LayerTimes(NO_TIME, NO_TIME, NO_TIME, NO_TIME)
    if o is None:
        return layer_times(w, m)
    attention, head = measured_attention(w, o), _head(w, o)
    if w.fixed.adapter_rank:
        frozen = {kind: _frozen_layer(w, m, o, kind) for kind in kinds_of_layers(w.fixed)}
        return LayerTimes(NO_TIME, NO_TIME, attention, head, frozen)
    dense = _layer(w, o, False)
    moe = _layer(w, o, True) if w.shape.moe else dense
    return LayerTimes(dense, moe, attention, head)


def measured_microbatch_compute(w: Workload, m: DeviceRates, k: LayerTimes) -> MicrobatchCompute:
    """Compute seconds of one microbatch, by pipeline rank: measured ones, or by the roofline."""
    if w.fixed.traced is not None:
        return traced_microbatch_compute(w, m)
    if w.fixed.operators is not None:
        return operator_microbatch_compute(w, m)
    o = m.constants.measured
    if o is None:
        return microbatch_compute(w, m, k)
    kinds, glue = k.by_kind(w), host_costs(o, w.fixed.kernels)
    embedding = o.operator(
        "embedding", "eager", w.tokens, w.hidden_per_rank, w.vocab_rows * w.tiling.gathered_blocks
    )
    rows = w.tokens / w.sequence_parallel
    norm = measured_seam(w, o, w.shape.norm, rows, w.hidden_per_rank, rows * w.hidden_per_rank)
    forward = (
        sum((n * x.forward for x, n in kinds), w.zeros)
        + w.has_head * (k.head.forward + norm.forward)
        + w.has_embedding * embedding.forward
        + w.fixed.chunks * glue.microbatch / 2
    )
    backward = (
        sum((n * x.backward for x, n in kinds), w.zeros)
        + w.has_head * (k.head.backward + norm.backward)
        + w.has_embedding * has_weight_gradients(w) * embedding.backward
        + w.fixed.chunks * glue.microbatch / 2
    )
    recompute = w.recomputed_layers * (k.repeated(w, "forward") + glue.full)
    recompute = recompute + w.layers * w.searched.selective * (k.attention.forward + glue.selective)
    weight = sum((n * x.weight_grad for x, n in kinds), w.zeros)
    idle = np.zeros_like(w.layers)
    return MicrobatchCompute(
        np.asarray(forward), np.asarray(backward + recompute), np.asarray(weight), idle, idle
    )


def measured_optimizer_seconds(w: Workload, m: DeviceRates, owned: Array) -> Array:
    """Seconds of the optimizer step beyond what the host does: measured, or by the roofline, as all
    of an offloaded one is.
    """
    o, rate = m.constants.measured, optimizer_seconds(w, m, owned)
    if o is None:
        return rate
    here = o.operator("adamw", "eager", owned, 1.0).forward
    return np.asarray(here + w.searched.offload_optimizer * (rate - here))


def _layer(w: Workload, o: MeasuredOperators, is_moe: bool) -> PassTimes:
    linear, attention, glue = (
        _linears(w, o, is_moe),
        measured_attention(w, o),
        host_costs(o, w.fixed.kernels),
    )
    parts = [*_seams(w, o, is_moe)]
    routed = measured_routing(w, o) if is_moe and w.shape.moe else NO_TIME
    deferring = w.fixed.splits_backward * glue.split
    forward = sum(p.forward for p in parts) + linear.forward + attention.forward + routed.forward
    backward = sum(p.backward for p in parts) + linear.backward + attention.backward
    return PassTimes(
        forward + glue.layer_forward + deferring,
        backward + routed.backward + glue.layer - glue.layer_forward,
        linear.weight_grad,
    )


def _frozen_layer(
    w: Workload, m: DeviceRates, o: MeasuredOperators, kind: AdaptedLayer
) -> PassTimes:
    """A layer whose weights are frozen beside adapters. What these have beside GEMMs, and
    dequantizing weights in 4 bits, is by the roofline.
    """
    attention, glue = measured_attention(w, o), host_costs(o, w.fixed.kernels)
    linear = _frozen_linears(w, o, kind)
    parts = [*_seams(w, o, kind.is_moe)]
    routed = measured_routing(w, o) if kind.is_moe else NO_TIME
    more = counted_seconds(m, adapter_bytes(w, kind, m.constants.dropout_bytes))
    forward = sum(p.forward for p in parts) + linear.forward + attention.forward + routed.forward
    backward = sum(p.backward for p in parts) + linear.backward + routed.backward + more[1]
    backward = backward + kind.has_attention_backward * attention.backward
    return PassTimes(
        forward + glue.layer_forward + more[0],
        kind.has_backward * (backward + glue.layer - glue.layer_forward),
    )


def _frozen_linears(w: Workload, o: MeasuredOperators, kind: AdaptedLayer) -> PassTimes:
    forward: Number = 0.0
    backward: Number = 0.0
    for gemm in frozen_gemms(w, kind):
        thin = [gemm.down, gemm.up] if gemm.down is not None and gemm.up is not None else []
        for p, trained in [(gemm.base, False), *((each, True) for each in thin)]:
            if p.upcast and o.has("routing"):
                continue  # the router, which routing has measured
            each = _linear(o, p)
            forward = forward + p.count * each.forward
            needed = gemm.has_input_gradient or p is gemm.up
            of_input = needed * (each.backward - each.weight)
            backward = backward + p.count * (of_input + trained * each.weight)
    return PassTimes(forward, backward)


def _linear(o: MeasuredOperators, p: LayerGemm) -> OperatorTimes:
    kind = "linear" if p.ungrouped or not o.has("grouped_linear") else "grouped_linear"
    return o.operator(kind, "eager", p.rows, p.columns, p.inner)


def _linears(w: Workload, o: MeasuredOperators, is_moe: bool) -> PassTimes:
    forward: Number = 0.0
    backward: Number = 0.0
    weight: Number = 0.0
    for gemm in layer_gemms(w, is_moe):
        if gemm.upcast and o.has("routing"):
            continue  # the router, which routing has measured
        each = _linear(o, gemm)
        forward = forward + gemm.count * each.forward
        weight = weight + gemm.count * each.weight
        backward = backward + gemm.count * each.backward
    return PassTimes(forward, backward, weight)


def _seams(w: Workload, o: MeasuredOperators, is_moe: bool) -> list[OperatorTimes]:
    """Two norms with their residuals, norms of heads, the rotation and the activation."""
    shape, wide = w.shape, w.ffn
    if is_moe and shape.moe:
        wide = w.routed_rows_per_token * w.expert_ffn + w.shared_ffn
    rows = w.tokens / w.sequence_parallel
    norm = measured_seam(w, o, shape.norm, rows, w.hidden_per_rank, rows * w.hidden_per_rank)
    activation = measured_seam(
        w, o, "swiglu" if shape.gated else "gelu", w.tokens, wide, w.tokens * wide
    )
    heads = w.q_width + w.k_width
    found = [norm, norm, activation]
    if shape.qk_norm:
        entries, wide = w.tokens * heads, int(shape.head_dim or 1)
        wide = heads / 2 if shape.qk_norm == "width" else wide
        found.append(measured_seam(w, o, "rmsnorm", entries / wide, wide, entries))
    if shape.positions != "rope":
        return found
    return [*found, measured_seam(w, o, "rope", w.tokens, heads, w.tokens * w.q_width)]


def _head(w: Workload, o: MeasuredOperators) -> PassTimes:
    """The output projection with its loss."""
    p = head_gemm(w)
    eager = o.operator("head_loss", "eager", p.rows, p.columns, p.inner)
    own = eager
    if w.uses_fused_kernels:
        fused = o.operator("head_loss", "compiled", p.rows, p.columns, p.inner)
        # A vocabulary-parallel loss has its logits, whichever kernel reads them.
        whole = (w.tiling.column_parts == 1) * 1.0
        own = measured_or_eager(whole, fused, eager)
    return PassTimes(p.count * own.forward, p.count * own.backward)
