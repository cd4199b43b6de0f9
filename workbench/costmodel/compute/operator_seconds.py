"""Compute of a microbatch under operator strategies: every operator at its local size, priced as a
layer's are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from workbench.costmodel.compute import measured_seams
from workbench.costmodel.compute.engine_traffic.engine_kernels import stage_kernels
from workbench.costmodel.compute.engine_traffic.engine_operators import (
    activation_bytes,
    counts_operators,
    dropped_bytes,
    loss_bytes,
    norm_bytes,
    rope_bytes,
    routing_bytes,
    ulysses_bytes,
)
from workbench.costmodel.compute.engine_traffic.float8_operators import float8_linear_bytes
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes, moved_by
from workbench.costmodel.compute.kernel_launches import kernel_launches
from workbench.costmodel.compute.kernel_rates import (
    DeviceRates,
    PassTimes,
    gemm_seconds,
    peak_flops,
)
from workbench.costmodel.compute.memory_bound import counted_seconds, seam_passes
from workbench.costmodel.compute.roofline import (
    LOSS_FORWARD_SHARE,
    MicrobatchCompute,
    accumulation_seconds,
    attention_pass,
    host_ahead,
)
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.stage_pass import StagePass
from workbench.costmodel.rank_passes import rank_passes

NO_TIME = PassTimes(0.0, 0.0)


def operator_microbatch_compute(w: Workload, m: DeviceRates) -> MicrobatchCompute:
    """Compute seconds of one microbatch, by pipeline rank."""
    price = _measured if m.constants.measured is not None else _modelled
    stages = rank_passes(w)
    known = {own: _of_rank(w, m, own, price) for own in dict.fromkeys(stages)}
    passes = [known[own] for own in stages]
    forward, backward, weight = (np.array(column) for column in zip(*passes))
    idle = np.zeros_like(w.layers)
    if m.constants.measured is not None:
        glue = measured_seams.host_costs(m.constants.measured, w.fixed.kernels)
        ends = w.fixed.chunks * glue.microbatch / 2
        return MicrobatchCompute(
            forward + w.layers * glue.layer_forward + ends,
            backward + w.layers * (glue.layer - glue.layer_forward) + ends,
            weight,
            idle,
            idle,
        )
    slowdown = m.constants.compute_slowdown
    forward, backward = slowdown * forward, slowdown * backward + accumulation_seconds(w, m)
    if counts_operators(w):
        host = [1e-6 * m.constants.launch_us * each for each in stage_kernels(w)]
        (forward, first), (backward, second) = (
            host_ahead(forward, host[0]),
            host_ahead(backward, host[1]),
        )
        return MicrobatchCompute(forward, backward, slowdown * weight, first, second)
    launches = [1e-6 * m.constants.launch_us * n * w.layers for n in kernel_launches(w, False)]
    return MicrobatchCompute(
        forward + launches[0], backward + launches[1], slowdown * weight, idle, idle
    )


Price = Callable[[Workload, DeviceRates, str, tuple[float, ...]], PassTimes]


def _of_rank(
    w: Workload, m: DeviceRates, stages: tuple[StagePass, ...], price: Price
) -> tuple[float, float, float]:
    """Seconds (in forward, in backward, of it weight gradients) of a rank's stages."""
    seconds, weight = {"F": 0.0, "B": 0.0}, 0.0
    for stage in stages:
        for (action, work), times in stage.work.items():
            one = price(w, m, work.kind, work.sizes)
            seconds[action] += times * float(getattr(one, work.direction))
            weight += times * float(one.weight_grad) * (work.direction == "backward")
    return seconds["F"], seconds["B"], weight


def _modelled(w: Workload, m: DeviceRates, kind: str, sizes: tuple[float, ...]) -> PassTimes:
    """Seconds of one operator by the roofline: counted traffic on a GPU, else a textbook's."""
    if kind == "linear":
        return _linear(w, m, *sizes[:3])
    if kind == "float8 linear":
        return _float8_linear(w, m, *sizes)
    if kind == "attention":
        return _attention(_attending(w, *sizes), m)
    if kind == "experts":
        rows, columns, inner, count = sizes
        one = _linear(w, m, rows, columns, inner)
        return PassTimes(*(count * each for each in (one.forward, one.backward, one.weight_grad)))
    if kind == "router":
        return _router(w, m, *sizes)
    if kind == "routing":
        return _routing(_routed(w, *sizes), m)
    if kind == "dropout":
        drawn = dropped_bytes(w, m.constants.dropout_bytes) * sizes[0]
        return PassTimes(*counted_seconds(m, MovedBytes(drawn, drawn)))
    if counts_operators(w):
        return PassTimes(*counted_seconds(m, _counted(w, kind, sizes)))
    return _textbook(w, m, kind, sizes)


def _float8_linear(
    w: Workload, m: DeviceRates, rows: float, columns: float, inner: float
) -> PassTimes:
    """GEMMs in 8 bits with the casts of their operands."""
    e = w.element_bytes
    sizes = (rows, columns, inner), (rows, inner, columns), (columns, inner, rows)
    forward, backward, weight = (gemm_seconds(m, *each, e, True) for each in sizes)
    one = PassTimes(forward, weight + backward, weight)
    if not counts_operators(w):
        return one
    casts = counted_seconds(m, float8_linear_bytes(w, rows, columns, inner))
    return replace(one, forward=one.forward + casts[0], backward=one.backward + casts[1])


def _attention(w: Workload, m: DeviceRates) -> PassTimes:
    """Attention with what context parallelism does around it."""
    own = attention_pass(w, m)
    if not (counts_operators(w) and w.fixed.has_context_parallel):
        return own
    copies = counted_seconds(m, ulysses_bytes(w))
    return replace(own, forward=own.forward + copies[0], backward=own.backward + copies[1])


def _routing(w: Workload, m: DeviceRates) -> PassTimes:
    """Router, dispatch and combine; a textbook copies tokens for both."""
    if counts_operators(w):
        return PassTimes(*counted_seconds(m, routing_bytes(w)))
    rows = w.routed_rows_per_token * w.tokens * w.hidden_per_rank
    moved = 8 * rows * w.element_bytes / 2
    return PassTimes(*counted_seconds(m, MovedBytes(moved, moved)))


def _routed(w: Workload, tokens: float, width: float) -> Workload:
    """The problem sizes of an MoE layer on so many tokens."""
    return replace(w, tokens=tokens, expert_ffn=width)


def _linear(w: Workload, m: DeviceRates, rows: float, columns: float, inner: float) -> PassTimes:
    return _gemms(m, rows, columns, inner, w.element_bytes)


def _router(w: Workload, m: DeviceRates, rows: float, columns: float, inner: float) -> PassTimes:
    """A router's GEMMs, in fp32 or better where the framework's are."""
    if not w.fixed.framework.experts.fp32_router or w.element_bytes == w.upcast_bytes:
        return _linear(w, m, rows, columns, inner)
    wide = replace(m, flops_16bit=peak_flops(w.fixed.gpu, "fp32"))
    return _gemms(wide, rows, columns, inner, w.upcast_bytes)


def _gemms(m: DeviceRates, rows: float, columns: float, inner: float, e: int) -> PassTimes:
    """Of a linear layer, in forward and for the gradients of its input and weight."""
    weight = gemm_seconds(m, columns, inner, rows, e)
    return PassTimes(
        gemm_seconds(m, rows, columns, inner, e),
        weight + gemm_seconds(m, rows, inner, columns, e),
        weight,
    )


def _attending(
    w: Workload, tokens: float, heads: float, head_dim: float, kv_heads: float
) -> Workload:
    wide, keys = heads * head_dim, kv_heads * head_dim
    return replace(
        w, tokens=tokens, heads=heads, q_width=wide, o_width=wide, k_width=keys, v_width=keys
    )


def _counted(w: Workload, kind: str, sizes: tuple[float, ...]) -> MovedBytes:
    """Bytes of an operator of this engine on a GPU."""
    e, (elements, *others) = w.element_bytes, sizes
    if kind == "norm":
        return norm_bytes(w, bool(others[1])).wide(elements)
    if kind == "rope":
        return rope_bytes(w, elements, others[0])
    if kind == "activation":
        return activation_bytes(w).wide(elements)
    if kind == "loss":
        return loss_bytes(w, others[1]).wide(elements)
    if kind == "lookup":
        masked = 2 * e * others[1]
        found = moved_by([2 * e, masked], [e, masked]).wide(elements)
        return found + moved_by([], [e]).wide(others[0])
    if kind == "positions":
        return moved_by([3 * e], [e]).wide(elements)
    apart = others[0]  # of a bias: whether it is added apart from its GEMM
    return moved_by([2 * e * apart], [e]).wide(elements) if kind == "bias" else _sum(e, elements)


def _sum(element_bytes: int, elements: float) -> MovedBytes:
    """Bytes of adding two gradients of one tensor."""
    return moved_by([], [3 * element_bytes]).wide(elements)


def _textbook(w: Workload, m: DeviceRates, kind: str, sizes: tuple[float, ...]) -> PassTimes:
    """The same by the counts that other frameworks' operators have."""
    elements, half = sizes[0], w.element_bytes / 2
    if kind == "lookup":
        each = 4 / m.bandwidth * elements * w.element_bytes
        return PassTimes(each, each)
    if kind == "loss":
        seconds = elements * (w.upcast_bytes / 4 * m.constants.loss_bytes / m.bandwidth)
        return PassTimes(LOSS_FORWARD_SHARE * seconds, (1 - LOSS_FORWARD_SHARE) * seconds)
    if kind == "rope":
        elements = sum(sizes[:2])
    place = ("norm", "rope", "activation").index(kind) if kind in SEAMS else None
    if place is None:
        return NO_TIME
    forward, backward = (
        elements * half / m.bandwidth * float(seams[place])
        for seams in seam_passes(w, m.constants, False)
    )
    return PassTimes(forward, backward)


SEAMS = ("norm", "rope", "activation")


def _measured(w: Workload, m: DeviceRates, kind: str, sizes: tuple[float, ...]) -> PassTimes:
    """Seconds of one operator as this machine's were measured."""
    o, shape = m.constants.measured, w.shape
    assert o is not None
    if kind == "attention":
        return measured_seams.measured_attention(_attending(w, *sizes), o)
    if kind == "router" and o.has("routing"):  # which has measured it too
        return NO_TIME
    if kind in ("linear", "float8 linear", "router"):
        one = o.operator("linear", "eager", *sizes[:3])
        return PassTimes(one.forward, one.backward, one.weight)
    if kind == "experts":
        name = "grouped_linear" if o.has("grouped_linear") else "linear"
        one, count = o.operator(name, "eager", *sizes[:3]), sizes[3]
        return PassTimes(*(count * each for each in (one.forward, one.backward, one.weight)))
    if kind == "routing":
        return measured_seams.measured_routing(_routed(w, *sizes), o)
    if kind == "lookup":
        elements, table, _ = sizes
        one = o.operator(
            "embedding", "eager", elements / shape.hidden, shape.hidden, table / shape.hidden
        )
        return PassTimes(one.forward, one.backward)
    if kind == "loss":
        elements, columns, _ = sizes
        both = [
            o.operator(name, "eager", elements / columns, columns, shape.hidden)
            for name in ("head_loss", "linear")
        ]
        forward, backward = (
            max(0.0, float(getattr(both[0], x) - getattr(both[1], x)))
            for x in ("forward", "backward")
        )
        return PassTimes(forward, backward)
    if kind not in SEAMS:
        return NO_TIME
    names = {"norm": shape.norm, "activation": "swiglu" if shape.gated else "gelu"}
    elements, width = (sizes[0] + sizes[1], sizes[2]) if kind == "rope" else sizes[:2]
    entries = sizes[0]
    one = measured_seams.measured_seam(
        w, o, names.get(kind, kind), elements / width, width, entries
    )
    return PassTimes(one.forward, one.backward)
