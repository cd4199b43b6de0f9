"""Compute of a CPU rank as the sum of its measured operators.

A layer is its linear layers, norms, rotation, attention and activation, each at its own size, and
what the host does between them: the rest of a tiny model's step, in which sizes do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.compute.kernel_launches import routing_launches
from workbench.costmodel.compute.kernel_rates import DeviceRates, PassTimes
from workbench.costmodel.compute.roofline import (
    LayerTimes,
    MicrobatchCompute,
    layer_times,
    microbatch_compute,
    optimizer_seconds,
)
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.layer_gemms import head_gemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import (
    has_weight_gradients,
    keeps_small_seams_eager,
    runs_fused_seam,
)
from workbench.costmodel.rates.measured_operators import MeasuredOperators, OperatorTimes
from workbench.plan.probe_plan import TINY, TINY_SEQUENCE
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS

ZERO = PassTimes(0.0, 0.0)


def measured_layer_times(w: Workload, m: DeviceRates) -> LayerTimes:
    """Seconds of one layer of each kind and of the head: measured ones, or by the roofline."""
    o = m.constants.measured
    if o is None:
        return layer_times(w, m)
    dense = _layer(w, o, False)
    moe = _layer(w, o, True) if w.shape.moe else dense
    return LayerTimes(dense, moe, _attention(w, o), _head(w, o))


def measured_microbatch_compute(w: Workload, m: DeviceRates, k: LayerTimes) -> MicrobatchCompute:
    """Compute seconds of one microbatch, by pipeline rank: measured ones, or by the roofline."""
    o = m.constants.measured
    if o is None:
        return microbatch_compute(w, m, k)
    sparse, glue = w.layers - w.dense_layers, host_costs(o, w.fixed.kernels)
    embedding = o.operator(
        "embedding", "eager", w.tokens, w.hidden_per_rank, w.vocab_rows * w.tiling.gathered_blocks
    )
    rows = w.tokens / w.sequence_parallel
    norm = _seam(w, o, w.shape.norm, rows, w.hidden_per_rank, rows * w.hidden_per_rank)
    forward = (
        w.dense_layers * k.dense.forward
        + sparse * k.moe.forward
        + w.has_head * (k.head.forward + norm.forward)
        + w.has_embedding * embedding.forward
        + w.fixed.chunks * glue.microbatch / 2
    )
    backward = (
        w.dense_layers * k.dense.backward
        + sparse * k.moe.backward
        + w.has_head * (k.head.backward + norm.backward)
        + w.has_embedding * embedding.backward
        + w.fixed.chunks * glue.microbatch / 2
    )
    recompute = w.recomputed_layers * (k.moe.forward + glue.full)
    recompute = recompute + w.layers * w.searched.selective * (k.attention.forward + glue.selective)
    weight = w.dense_layers * k.dense.weight_grad + sparse * k.moe.weight_grad
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


@dataclass(frozen=True)
class HostCosts:
    """Seconds that the host takes between operators, of whatever size."""

    layer: float
    """Of a layer, forward and backward."""
    layer_forward: float
    """Its part in forward."""
    microbatch: float
    full: float
    """More of a layer that is recomputed in full, beside its forward."""
    selective: float
    """More of a layer whose attention is recomputed."""
    split: float
    """More of a layer whose weight gradients are deferred."""


def host_costs(o: MeasuredOperators, kernels: str) -> HostCosts:
    """What is left of a tiny model's step without its operators. Fused kernels leave seams of that
    size plain, so that they are as eager ones.
    """
    host, slow = o.host, 1e-6 * o.scale.compute
    compiled = float(kernels == "compiled")
    code = "compiled" if compiled else "eager"
    hidden, heads, ffn, rows = TINY["hidden"], TINY["heads"], TINY["ffn"], TINY_SEQUENCE
    attention = o.operator("attention", "eager", heads, rows, hidden // heads)
    parts = [
        *[o.operator("linear", "eager", rows, hidden, hidden)] * 4,
        *[o.operator("linear", "eager", rows, ffn, hidden)] * 2,
        o.operator("linear", "eager", rows, hidden, ffn),
        *[o.operator("rmsnorm", code, rows, hidden)] * 2,
        o.operator("rope", code, rows, 2 * hidden),
        o.operator("swiglu", code, rows, ffn),
        attention,
    ]
    ends = [
        o.operator("head_loss", code, rows, TINY["vocab"], hidden),
        o.operator("embedding", "eager", rows, hidden, TINY["vocab"]),
        o.operator("rmsnorm", code, rows, hidden),
    ]
    forward, backward = (float(sum(getattr(p, x) for p in parts)) for x in ("forward", "backward"))
    whole = slow * (host.layer_us + compiled * host.compiled_layer_us)
    microbatch = slow * (host.microbatch_us + compiled * host.compiled_microbatch_us)
    layer = max(0.0, whole - forward - backward)
    own = layer * forward / (forward + backward)
    return HostCosts(
        layer,
        own,
        max(0.0, microbatch - sum(float(p.forward + p.backward) for p in ends)),
        host_costs(o, "eager").full if compiled else max(0.0, slow * host.full_us - forward - own),
        max(0.0, slow * host.selective_us - float(attention.forward)),
        slow * host.split_us,
    )


def _layer(w: Workload, o: MeasuredOperators, is_moe: bool) -> PassTimes:
    linear, attention, glue = (
        _linears(w, o, is_moe),
        _attention(w, o),
        host_costs(o, w.fixed.kernels),
    )
    parts = [*_seams(w, o, is_moe)]
    routed = _routing(w, o) if is_moe and w.shape.moe else ZERO
    deferring = w.fixed.splits_backward * glue.split
    forward = sum(p.forward for p in parts) + linear.forward + attention.forward + routed.forward
    backward = sum(p.backward for p in parts) + linear.backward + attention.backward
    return PassTimes(
        forward + glue.layer_forward + deferring,
        backward + routed.backward + glue.layer - glue.layer_forward,
        linear.weight_grad,
    )


def _linears(w: Workload, o: MeasuredOperators, is_moe: bool) -> PassTimes:
    forward: Number = 0.0
    backward: Number = 0.0
    weight: Number = 0.0
    for gemm in layer_gemms(w, is_moe):
        if gemm.upcast and o.has("routing"):
            continue  # the router, which routing has measured
        kind = "linear" if gemm.ungrouped or not o.has("grouped_linear") else "grouped_linear"
        each = o.operator(kind, "eager", gemm.rows, gemm.columns, gemm.inner)
        forward = forward + gemm.count * each.forward
        weight = weight + gemm.count * each.weight * has_weight_gradients(w)
        frozen = each.weight * (1 - has_weight_gradients(w))
        backward = backward + gemm.count * (each.backward - frozen)
    return PassTimes(forward, backward, weight)


def _seams(w: Workload, o: MeasuredOperators, is_moe: bool) -> list[OperatorTimes]:
    """Two norms with their residuals, the rotation and the activation."""
    shape, wide = w.shape, w.ffn
    if is_moe and shape.moe:
        wide = w.routed_rows_per_token * w.expert_ffn + w.shared_ffn
    rows = w.tokens / w.sequence_parallel
    norm = _seam(w, o, shape.norm, rows, w.hidden_per_rank, rows * w.hidden_per_rank)
    activation = _seam(w, o, "swiglu" if shape.gated else "gelu", w.tokens, wide, w.tokens * wide)
    if shape.positions != "rope":
        return [norm, norm, activation]
    heads = w.q_width + w.k_width
    return [norm, norm, activation, _seam(w, o, "rope", w.tokens, heads, w.tokens * w.q_width)]


def _seam(
    w: Workload, o: MeasuredOperators, kind: str, rows: Number, columns: Number, entries: Number
) -> OperatorTimes:
    """A seam by the code that the plan's kernels choose for it."""
    eager = o.operator(kind, "eager", rows, columns)
    plain = keeps_small_seams_eager(w) and kind in ATEN_SEAMS
    if not w.uses_fused_kernels or plain:
        return eager
    fused = runs_fused_seam(w, entries)
    return _chosen(fused, o.operator(kind, "compiled", rows, columns), eager)


def _chosen(first: Number, one: OperatorTimes, other: OperatorTimes) -> OperatorTimes:
    return OperatorTimes(
        *(
            np.asarray(b + first * (a - b))
            for a, b in (
                (one.forward, other.forward),
                (one.backward, other.backward),
                (one.weight, other.weight),
            )
        )
    )


def _attention(w: Workload, o: MeasuredOperators) -> PassTimes:
    """Causal attention to a rank's own keys, and a step for every other rank of a ring."""
    length = w.fixed.sequence_length / w.ring
    sequences = w.tokens * w.searched.context / w.fixed.sequence_length
    heads, width = sequences * w.heads / w.ulysses, w.shape.head_dim or 1
    own = o.operator("attention", "eager", heads, length, width)
    step = o.operator("ring_step", "eager", heads, length, width)
    others, copies = w.ring - 1, _head_copies(w, o)
    return PassTimes(
        own.forward + others * step.forward + copies, own.backward + others * step.backward + copies
    )


def _head_copies(w: Workload, o: MeasuredOperators) -> Number:
    """Ulysses' copies in one pass: queries, keys and values joined, made contiguous for the
    all-to-all and put in the order of tokens; the output twice.
    """
    joined = w.tokens * (w.q_width + w.kv_head_repeats * (w.k_width + w.v_width))
    out = w.tokens * w.o_width
    read_and_written = 2 * w.element_bytes
    each = 3 * o.stream_seconds(read_and_written * joined)
    return (w.ulysses > 1) * (each + 2 * o.stream_seconds(read_and_written * out))


def _head(w: Workload, o: MeasuredOperators) -> PassTimes:
    """The output projection with its loss."""
    p = head_gemm(w)
    eager = o.operator("head_loss", "eager", p.rows, p.columns, p.inner)
    own = eager
    if w.uses_fused_kernels:
        fused = o.operator("head_loss", "compiled", p.rows, p.columns, p.inner)
        # A vocabulary-parallel loss has its logits, whichever kernel reads them.
        whole = (w.tiling.column_parts == 1) * 1.0
        own = _chosen(whole, fused, eager)
    return PassTimes(p.count * own.forward, p.count * own.backward)


def _routing(w: Workload, o: MeasuredOperators) -> PassTimes:
    """Router, dispatch and combine; where experts are spread over ranks, rows are put in the order
    of experts and back.
    """
    rows, moe = w.routed_rows_per_token * w.tokens, w.shape.moe
    assert moe is not None
    moved = 2 * rows * w.hidden_per_rank * w.element_bytes
    if not o.has("routing"):
        launches = routing_launches(w)
        copies, each = o.stream_seconds(2 * moved), 1e-6 * o.host.operator_us * o.scale.compute
        return PassTimes(launches[0] * each + copies, launches[1] * each + copies)
    own = o.operator("routing", "eager", rows, w.hidden_per_rank, moe.experts)
    sorted_twice = (w.searched.expert > 1) * 2 * o.stream_seconds(moved)
    return PassTimes(own.forward + sorted_twice, own.backward + sorted_twice)
