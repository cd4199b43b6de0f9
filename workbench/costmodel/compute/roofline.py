"""Seconds of compute: a roofline over matrix products, attention and memory-bound operators, with a
launch floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.frameworks.stragglers import met
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload, widths
from workbench.costmodel.memory.activation_memory import ATEN, leaves_plain, replaced
from workbench.costmodel.rates.constants import Constants
from workbench.machine.hardware import GPU

OPERATORS = {"eager": (36, 70), "compiled": (14, 26), "fused": (20, 40)}
"""Kernels of one layer (forward, backward), by the plan's kernels: our plain modules', and textbook
counts.
"""
REPLACED = 12, 22
"""The same of our modules whose seams are replaced, compiled or fused: products, attention and one
operator a seam.
"""
NARROW_HEAD = 100
"""Heads narrower than this fill fused attention's tiles less."""
ALIGNMENT = 64
"""Widths that are multiples of this fill the tiles of a matrix product."""
LOSS_FORWARD = 3 / 7
"""Share of the loss's traffic that forward moves: cast and log-softmax are three passes, two
gradients four.
"""


@dataclass(frozen=True)
class Machine:
    """One card: what a kernel can reach at best."""

    flops: float
    """Matrix products of layers, FLOP/s at the plan's precision."""
    wide_flops: float
    """Attention and the head, which stay in 16 bits where products are in fp8."""
    bandwidth: float
    """Bytes a second."""
    constants: Constants
    asynchronous: bool
    """Whether the host runs ahead, so that launching hides behind compute."""


def peak(card: GPU, precision: str) -> float:
    """Dense FLOP/s at a precision; a dtype that the card does not list runs as fp32."""
    return card.tflops.get(precision, card.tflops.get("fp32", max(card.tflops.values()))) * 1e12


def machine(card: GPU, precision: str, constants: Constants) -> Machine:
    """A card at a precision."""
    dense = peak(card, precision)
    wide = (
        1e12 * card.tflops.get("bf16", card.tflops.get("fp16", dense / 1e12))
        if precision == "fp8"
        else dense
    )
    return Machine(
        dense,
        wide,
        card.bandwidth_gbs * 1e9 * constants.memory_share,
        constants,
        card.device != "cpu",
    )


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward and of a backward of one microbatch."""

    forward: Number
    backward: Number
    weight: Number = 0.0
    """Of the backward, what makes the weights' gradients."""
    idle_forward: Number = 0.0
    """Of the forward, what the card waits for the host: communication hides in it."""
    idle_backward: Number = 0.0
    """The same of the backward."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of one layer and microbatch of each kind, and of the head: what no pipeline or
    sharding changes.
    """

    dense: Pass
    mixture: Pass
    attention: Pass
    head: Pass


@dataclass(frozen=True)
class Compute:
    """Seconds of one microbatch, by pipeline rank."""

    forward: Array
    backward: Array
    weight: Array
    """Of the backward, what makes the weights' gradients."""
    idle_forward: Array
    """Of the forward, what the card waits for the host."""
    idle_backward: Array


def product(
    m: Machine, rows: Number, columns: Number, inner: Number, element: int, narrow: bool = False
) -> Number:
    """One matrix product [rows, inner] x [inner, columns], seconds; `narrow` ones run in fp8."""
    c = m.constants
    rate = m.flops * c.narrow_share if narrow else m.wide_flops * c.gemm_share
    slow = 1 + c.gemm_half_dim * (1 / rows + 1 / columns + 1 / inner)
    odd = (columns % ALIGNMENT != 0) | (inner % ALIGNMENT != 0)
    flops = 2 * rows * columns * inner / rate * slow * (1 + c.gemm_misaligned * odd)
    return np.maximum(
        flops, (rows * columns + rows * inner + columns * inner) * element / m.bandwidth
    )


def kernels(w: Workload, m: Machine) -> Kernels:
    """One layer of each kind and the head."""
    dense = layer_pass(w, m, False)
    mixture = layer_pass(w, m, True) if w.shape.moe else dense
    return Kernels(dense, mixture, attention_pass(w, m), head_pass(w, m))


def compute(w: Workload, m: Machine, k: Kernels) -> Compute:
    """One microbatch on each pipeline rank."""
    k = _met(w, m.constants, k)
    sparse = w.layers - w.dense_layers
    embedding = w.first * (4 / m.bandwidth * w.stream)
    forward = w.dense_layers * k.dense.forward + w.last * k.head.forward + embedding
    backward = w.dense_layers * k.dense.backward + w.last * k.head.backward + embedding
    if w.shape.moe:
        forward = forward + sparse * k.mixture.forward
        backward = backward + sparse * k.mixture.backward
    # Every microbatch after the first adds its gradients to those that are there.
    added = w.held.trained * (
        (2 * w.stored_gradient + w.element) / m.bandwidth * (w.microbatches > 1)
    )
    backward = backward + added
    repeated = w.setting.software.selective_again  # of a layer's forward; else attention alone
    part = k.attention.forward if repeated < 0 else repeated * k.mixture.forward
    again = w.recomputed * k.mixture.forward + w.layers * (w.knobs.selective * part)
    weight = w.dense_layers * k.dense.weight + sparse * k.mixture.weight + w.last * k.head.weight
    idle = [
        np.asarray(w.dense_layers * a + sparse * b)
        for a, b in (
            (k.dense.idle_forward, k.mixture.idle_forward),
            (k.dense.idle_backward, k.mixture.idle_backward),
        )
    ]
    return Compute(forward, backward + again, np.asarray(weight), *idle)


def _met(w: Workload, c: Constants, k: Kernels) -> Kernels:
    """Layers of a stack whose tensor ranks wait for each other's hosts."""
    if not c.host_meeting_us:
        return k
    least = 1e-6 * (c.host_us + c.host_meeting_us * met(w, c))
    return replace(k, dense=_at_least(k.dense, least), mixture=_at_least(k.mixture, least))


def _at_least(one: Pass, least: Number) -> Pass:
    """The pass of a layer in which the card also waits until `least` seconds are over."""
    forward, backward = np.maximum(one.forward, least), np.maximum(one.backward, least)
    return Pass(
        forward,
        backward,
        one.weight,
        one.idle_forward + forward - one.forward,
        one.idle_backward + backward - one.backward,
    )


def model_flops(w: Workload) -> Number:
    """FLOPs of one microbatch of every replica through the whole model on one tensor and context
    rank: causal attention counted half, forward and backward, nothing recomputed. Frozen weights
    have no gradients; padding is no work.
    """
    w = replace(w, **widths(w.shape, w.tiling.columns, padded=False))
    sparse, passes = w.layers - w.dense_layers, 2 + float(w.setting.adapter_rank == 0)
    products = (
        w.dense_layers * layer_flops(w, False)
        + sparse * layer_flops(w, True)
        + w.last * head_flops(w)
    )
    each = passes * products + 3 * w.layers * attention_flops(w)
    return (w.weight * w.data * each).sum(axis=0)


@dataclass(frozen=True)
class Product:
    """`count` matrix products [rows, inner] x [inner, columns]."""

    rows: Number
    columns: Number
    inner: Number
    count: Number = 1.0
    alone: bool = True
    """Whether it is one product, not one of a group of experts'."""

    @property
    def flops(self) -> Number:
        """Multiplications and additions."""
        return 2 * self.count * self.rows * self.columns * self.inner


def layer_products(w: Workload, mixture: bool) -> list[Product]:
    """Each matrix product of one layer's forward; the experts of a rank one by one."""
    h, t, n = w.hidden, w.tokens * w.tiling.gathered, w.tiling.steps
    mla = w.shape.mla
    if mla is None and w.setting.software.joined:
        into = [Product(t, w.q_width + w.k_width + w.v_width, h, n)]
    elif mla is None:
        into = [
            Product(t, w.q_width, h, n),
            Product(t, w.k_width, h, n),
            Product(t, w.v_width, h, n),
        ]
    else:
        part = w.tiling.hidden
        q_rank, kv_rank = (mla.q_rank or 0) / part, mla.kv_rank / part
        query = [(q_rank, h), (w.q_width, q_rank)] if mla.q_rank else [(w.q_width, h)]
        up = w.heads * (mla.nope_dim + mla.value_dim)
        widths = [*query, (kv_rank + mla.rope_dim / part, h), (up, kv_rank)]
        into = [Product(t, columns, inner, n) for columns, inner in widths]
    return [*into, Product(t, h, w.o_width, n), *_feed_forward_products(w, mixture)]


def _feed_forward_products(w: Workload, mixture: bool) -> list[Product]:
    h, t, n = w.hidden, w.tokens * w.tiling.gathered, w.tiling.steps
    moe, wide, joined = w.shape.moe, 2 if w.shape.gated else 1, 1
    if w.setting.software.joined:
        wide, joined = 1, wide
    if not mixture or moe is None:
        return [Product(t, joined * w.ffn, h, n)] * wide + [Product(t, h, w.ffn, n)]
    width, own = w.expert_ffn, moe.experts / w.knobs.expert
    routed = t * w.visits / own
    result = [
        Product(t, moe.experts / w.tiling.hidden, h, n),
        *[Product(routed, joined * width, h, n * own, False)] * wide,
    ]
    result.append(Product(routed, h, width, n * own, False))
    if moe.shared:
        result += [
            *[Product(t, joined * w.shared_ffn, h, n)] * wide,
            Product(t, h, w.shared_ffn, n),
        ]
    return result


def layer_pass(w: Workload, m: Machine, mixture: bool) -> Pass:
    """One layer and microbatch; a backward product is two, for the input and for the weight."""
    e, narrow = w.element, w.setting.precision == "fp8"
    every, trained = layer_products(w, mixture), float(w.setting.adapter_rank == 0)
    each = [(p, p.count / (1.0 if p.alone else m.constants.grouped_share)) for p in every]
    forward = sum(n * product(m, p.rows, p.columns, p.inner, e, narrow) for p, n in each)
    weight = trained * sum(n * product(m, p.columns, p.inner, p.rows, e, narrow) for p, n in each)
    backward = weight + sum(n * product(m, p.rows, p.inner, p.columns, e, narrow) for p, n in each)
    attention, bound, pace = attention_pass(w, m), memory_bound(w, m, mixture), m.constants.pace
    launches = _launches(w, mixture)
    forward = pace * (forward + attention.forward + bound.forward)
    backward = pace * (backward + attention.backward + bound.backward)
    there, back = (
        _launched(m, seconds, n, mixture) for seconds, n in zip((forward, backward), launches)
    )
    ahead = float(m.asynchronous)
    return Pass(there, back, pace * weight, ahead * (there - forward), ahead * (back - backward))


def _launches(w: Workload, mixture: bool) -> tuple[Number, Number]:
    """Kernels of one layer, forward and backward: of the seams that run our own operator, and of
    those left plain.
    """
    if not w.fused:
        return OPERATORS[w.setting.kernels]
    norm, rope, activation = _replaced(w, mixture)
    seams = [norm, activation, *([rope] if w.shape.positions == "rope" else [])]
    share = sum(seams) / len(seams)
    return tuple(plain + (own - plain) * share for own, plain in zip(REPLACED, OPERATORS["eager"]))


def _replaced(w: Workload, mixture: bool) -> tuple[Number, Number, Number]:
    """Whether norms, positions and the activation run our own operators (`kernels/fused_seams.py`):
    1 or 0.
    """
    wide = w.visits * w.expert_ffn + w.shared_ffn if mixture and w.shape.moe else w.ffn
    sizes = w.hidden / w.sequence_parallel, w.q_width, wide
    kinds = w.shape.norm, "rope", w.shape.mlp
    kept = [1.0 - (leaves_plain(w) and kind in ATEN) for kind in kinds]
    norm, rope, activation = (own * replaced(w, w.tokens * size) for own, size in zip(kept, sizes))
    return norm, rope, activation


def _launched(m: Machine, seconds: Number, kernels: int, mixture: bool) -> Number:
    """With a host that runs ahead the slower of the two decides; without one they add."""
    c = m.constants
    host = ((c.host_us or kernels * c.launch_us) + mixture * c.host_routing_us) * 1e-6
    return np.maximum(seconds, host) if m.asynchronous else seconds + host


def attention_pass(w: Workload, m: Machine) -> Pass:
    """Causal attention of one layer: fused, backward does two and a half times the work
    (2307.08691); unfused, whole products, and scores that pass through memory.
    """
    c, heads = m.constants, (w.shape.head_dim or 128)
    if not w.setting.software.unfused:
        rate = (
            m.wide_flops * c.attention_share * (c.attention_narrow if heads < NARROW_HEAD else 1.0)
        )
        forward = attention_flops(w) / rate
        return Pass(forward, 2.5 * forward / c.attention_backward)
    rate = m.wide_flops * c.unfused_share * min(1.0, heads / 128)
    drop, scores = w.setting.software.dropout, w.heads * w.tokens * w.setting.sequence_length
    moved = 1.5 * scores / m.bandwidth
    products = 2 * attention_flops(w) / rate
    return Pass(products + (4 + 5 * drop) * moved, 2 * products + (6 + 5 * drop) * moved)


def attention_flops(w: Workload) -> Number:
    """Scores and values of one layer forward, the causal half."""
    length = w.setting.sequence_length
    seen = min(length, w.shape.window or length)
    return w.tokens * seen * (w.k_width if w.shape.mla else w.q_width) + w.tokens * seen * w.o_width


def memory_bound(w: Workload, m: Machine, mixture: bool) -> Pass:
    """Norms, residuals, positions and activation of one layer, by bytes moved at the textbook
    count.
    """
    h, gated, half = w.hidden / w.sequence_parallel, w.shape.gated, w.element / 2
    rope = 8 * (w.q_width + w.k_width) if w.shape.positions == "rope" else 0.0
    drop = 4 * w.setting.software.dropout * h
    if w.setting.dropout:
        drop = drop + 2 * m.constants.dropout_bytes / half * h
    passes = (6, 10) if gated else (4, 6)
    inputs, wide = 2 * h, w.ffn
    if (
        mixture and w.shape.moe
    ):  # an activation for every visit of an expert; tokens copied there and back
        inputs, wide = inputs + w.visits * h, w.visits * w.expert_ffn + w.shared_ffn
    copies = 8 * (inputs - 2 * h)
    c = m.constants
    norms, turned, wider, rest = c.traffic, c.traffic, c.traffic, c.traffic
    if leaves_plain(w):
        own = _replaced(w, mixture)
        norms, turned, wider = (
            c.plain_traffic + (c.traffic - c.plain_traffic) * one for one in own
        )
        rest = c.plain_traffic
    moved = rope * turned + (drop + copies) * rest
    forward, backward = (
        count * h * norms + each * wide * wider + moved for count, each in zip((20, 36), passes)
    )
    if w.setting.precision == "fp8":
        cast = 4 * (inputs + wide) * rest
        forward, backward = forward + cast, backward + cast
    rate = m.bandwidth / (w.tokens * half)
    return Pass(forward / rate, backward / rate)


def head_pass(w: Workload, m: Machine) -> Pass:
    """Projection onto the vocabulary and the loss."""
    p = head_product(w)
    t, v, h, n = p.rows, p.columns, p.inner, p.count
    loss = w.tokens * v * (w.wide / 4 * m.constants.loss_bytes / m.bandwidth)
    forward = n * product(m, t, v, h, w.element) + LOSS_FORWARD * loss
    weight = n * product(m, v, h, t, w.element) * float(w.setting.adapter_rank == 0)
    backward = weight + n * product(m, t, h, v, w.element) + (1 - LOSS_FORWARD) * loss
    pace = m.constants.pace
    return Pass(pace * forward, pace * backward, pace * weight)


def layer_flops(w: Workload, mixture: bool) -> Number:
    """Forward FLOPs of the matrix products of one layer and microbatch on a rank, attention's
    apart.
    """
    return sum(p.flops for p in layer_products(w, mixture))


def head_flops(w: Workload) -> Number:
    """Forward FLOPs of the output projection on a rank."""
    return head_product(w).flops


def head_product(w: Workload) -> Product:
    """The projection onto the vocabulary."""
    return Product(w.tokens * w.tiling.gathered, w.vocab, w.hidden, w.tiling.steps)


def optimizer_seconds(w: Workload, m: Machine, owned: Array) -> Array:
    """The update and the gradient norm: every state read and written once, the gradient read twice.

    Where ranks broadcast their shares of stepped parameters in turn, as many turns as shares.
    """
    kept = w.setting.moment_bytes + (w.setting.master_bytes or w.element)
    traffic = owned * (2 * kept + 2 * w.gradient_element + w.element)
    host = (
        m.constants.host_gbs * 1e9
    )  # where the optimizer lives on the host, its processors step it (2101.06840)
    turns = 1e-3 * m.constants.turn_ms * (w.zero in (1, 2)) * w.knobs.shard
    return traffic / (m.bandwidth + (host - m.bandwidth) * w.knobs.offload_optimizer) + turns
