"""The router of an MoE layer on shapes (`models/moe_routing.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.costmodel.memory.activation_memory import CHOICE_BYTES, TOKEN_ID_BYTES
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_checkpoint import kept_for_recomputation
from workbench.costmodel.operators.symbolic_rank import AxisCall, SymbolicRank
from workbench.plan.model.model_shape import Moe, rows_of_an_expert


@dataclass(frozen=True)
class Routed:
    """The rows that experts compute."""

    count: int
    of_choices: SymbolicTensor
    """Row of each choice."""
    tokens: SymbolicTensor
    """Token of each row."""
    kept: SymbolicTensor | None
    """Which choices are not dropped; None: all."""


@dataclass(frozen=True)
class Routing:
    """What a router chooses."""

    gates: SymbolicTensor
    """[tokens, choices]."""
    rows: Routed
    aux_loss: SymbolicTensor | None


def routed(r: SymbolicRank, x: SymbolicTensor, weight: SymbolicTensor) -> Routing:
    """Route [B, T, D] by the largest scores, in fp32 or better."""
    moe = r.w.shape.moe
    assert moe is not None
    u, shape = r.w.upcast_bytes, (*x.shape[:2], moe.top_k)
    scores = _softmax(r, _scores(r, x, weight))
    choices = kept_for_recomputation(r, lambda: _choices(r, scores, shape))
    experts = r.empty(shape, TOKEN_ID_BYTES)
    del choices
    gates = _gathered(r, scores, experts)
    if moe.renormalise:
        gates = _divided_by_sum(r, gates)
    gates = gates if u == x.element_bytes else _cast(r, gates, x.element_bytes)
    aux_loss = _aux_loss(r, scores, moe) if moe.auxiliary_loss > 0 else None
    rows = _dropless(r, shape, moe) if moe.capacity is None else _with_capacity(r, shape, moe)
    if rows.kept is not None:
        gates = _masked(r, gates, rows.kept)
    return Routing(gates, rows, aux_loss)


def _scores(r: SymbolicRank, x: SymbolicTensor, weight: SymbolicTensor) -> SymbolicTensor:
    u = r.w.upcast_bytes
    wide = _upcast(r, x), _upcast(r, weight)
    y = r.empty((*x.shape[:-1], weight.shape[0]), u)
    del wide
    r.compute("router", x.numel // x.shape[-1], *weight.shape)

    def backward(gradient: SymbolicTensor) -> Gradients:
        wide = _upcast(r, weight)
        to_x = r.like(x, u)
        del wide
        wide = _upcast(r, x)
        to_weight = r.like(weight, u)
        del wide
        if u == x.element_bytes:
            return to_x, to_weight
        return r.like(x), r.like(weight)

    return r.made(y, backward, x, weight)


def _upcast(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    u = r.w.upcast_bytes
    return x if x.element_bytes == u else r.like(x, u)


def _softmax(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    y = r.like(x)
    out = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(out),)

    return r.made(y, backward, x)


def _choices(r: SymbolicRank, scores: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    """The experts with the largest scores, in 16 bits."""
    values, indices = r.like(replace(scores, shape=shape)), r.empty(shape, TOKEN_ID_BYTES)
    del values
    return r.empty(indices.shape, CHOICE_BYTES)


def _gathered(r: SymbolicRank, scores: SymbolicTensor, experts: SymbolicTensor) -> SymbolicTensor:
    shape, size = scores.shape, scores.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert experts is not None
        return (r.empty(shape, size),)

    return r.made(r.empty(experts.shape, size), backward, scores)


def _divided_by_sum(r: SymbolicRank, gates: SymbolicTensor) -> SymbolicTensor:
    total = r.empty((*gates.shape[:-1], 1), gates.element_bytes)

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert total is not None
        return (r.like(gates),)

    return r.made(r.like(gates), backward, gates)


def _cast(r: SymbolicRank, x: SymbolicTensor, element_bytes: int) -> SymbolicTensor:
    shape, before = x.shape, x.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.empty(shape, before),)

    return r.made(r.like(x, element_bytes), backward, x)


def _masked(r: SymbolicRank, gates: SymbolicTensor, kept: SymbolicTensor) -> SymbolicTensor:
    def backward(gradient: SymbolicTensor) -> Gradients:
        assert kept is not None
        return (r.like(gradient),)

    return r.made(r.like(gates), backward, gates)


def _aux_loss(r: SymbolicRank, scores: SymbolicTensor, moe: Moe) -> SymbolicTensor:
    """The load-balancing loss of each sequence."""
    u, of_sequences = r.w.upcast_bytes, (scores.shape[0], moe.experts)
    counts, ones = r.empty(of_sequences, u), r.empty((*scores.shape[:2], moe.top_k), u)
    del ones
    if (ranks := float(r.w.searched.context)) > 1:
        r.call_axis(AxisCall("context", "", "all_reduce", ranks, "fp32", counts.bytes, r.action))
    shares = r.like(counts)
    total, product = r.like(counts), r.like(counts)
    del total, product, counts
    shape = scores.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert shares is not None
        return (r.empty(of_sequences, u),)

    return r.made(r.empty((), u), backward, replace(scores, shape=shape))


def _dropless(r: SymbolicRank, shape: tuple[int, ...], moe: Moe) -> Routed:
    """A row for every choice."""
    count = shape[0] * shape[1] * shape[2]
    values, order = r.empty((count,), TOKEN_ID_BYTES), r.empty((count,), TOKEN_ID_BYTES)
    del values
    rows, numbers = r.empty((count,), TOKEN_ID_BYTES), r.empty((count,), TOKEN_ID_BYTES)
    del numbers
    tokens = r.empty((count,), TOKEN_ID_BYTES)
    del order

    def counts() -> SymbolicTensor:
        ranks, size = float(r.w.searched.expert), TOKEN_ID_BYTES * moe.experts
        if ranks > 1:
            r.call_axis(AxisCall("expert", "", "all_to_all", ranks, "int64", size, r.action))
        return r.empty((moe.experts,), TOKEN_ID_BYTES)

    kept_for_recomputation(r, counts)
    return Routed(count, rows, tokens, None)


def _with_capacity(r: SymbolicRank, shape: tuple[int, ...], moe: Moe) -> Routed:
    """As many rows for every expert and sequence."""
    count = moe.experts * shape[0] * rows_of_an_expert(shape[1], moe)
    queue, place = r.empty(shape, TOKEN_ID_BYTES), r.empty(shape, TOKEN_ID_BYTES)
    del queue
    rows, kept = r.empty(shape, TOKEN_ID_BYTES), r.empty(shape, 1)
    del place
    return Routed(count, rows, r.empty((count + 1,), TOKEN_ID_BYTES), kept)
