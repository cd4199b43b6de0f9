"""Measured seams, attention and host costs of CPU ranks, each at its own size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.compute.kernel_launches import routing_launches
from workbench.costmodel.compute.kernel_rates import PassTimes
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager, runs_fused_seam
from workbench.costmodel.rates.measured_operators import MeasuredOperators, OperatorTimes
from workbench.plan.probe_plan import TINY, TINY_SEQUENCE
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS


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


def measured_seam(
    w: Workload, o: MeasuredOperators, kind: str, rows: Number, columns: Number, entries: Number
) -> OperatorTimes:
    """A seam by the code that the plan's kernels choose for it."""
    eager = o.operator(kind, "eager", rows, columns)
    plain = keeps_small_seams_eager(w) and kind in ATEN_SEAMS
    if not w.uses_fused_kernels or plain:
        return eager
    fused = runs_fused_seam(w, entries)
    return measured_or_eager(fused, o.operator(kind, "compiled", rows, columns), eager)


def measured_or_eager(first: Number, one: OperatorTimes, other: OperatorTimes) -> OperatorTimes:
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


def measured_attention(w: Workload, o: MeasuredOperators) -> PassTimes:
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
    out = w.tokens * w.attended_width
    read_and_written = 2 * w.element_bytes
    each = 3 * o.stream_seconds(read_and_written * joined)
    return (w.ulysses > 1) * (each + 2 * o.stream_seconds(read_and_written * out))


def measured_routing(w: Workload, o: MeasuredOperators) -> PassTimes:
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
