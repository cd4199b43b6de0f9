"""Ulysses on shapes (`parallel/context/ulysses_attention.py`): all-to-alls round attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import AxisCall, SymbolicRank
from workbench.runtime_facts.tensor_strides import heads_first_strides, strides_of

Shape = tuple[int, ...]
Attention = Callable[..., tuple[SymbolicTensor, ...]]


def ulysses_attend(
    r: SymbolicRank, attend: Attention, q: SymbolicTensor, k: SymbolicTensor, v: SymbolicTensor
) -> SymbolicTensor:
    """Attention of this rank's tokens [B, T / ranks, heads, head_dim], of whose heads each rank
    computes some for all tokens.
    """
    ranks = int(r.w.ulysses)
    repeats = ranks // math.gcd(k.shape[2], ranks)
    if repeats > 1:
        k, v = _repeated(r, k, repeats), _repeated(r, v, repeats)
    joined = _joined(r, ranks, q, k, v)
    batch, length, heads, head_dim = joined.shape
    exchanged = _to_heads(r, joined, (batch, length * ranks, heads // ranks, head_dim))
    own = [x.shape[2] // ranks for x in (q, k, v)]
    del joined, q, k, v
    (out,) = attend(*_split(r, exchanged, own))
    del exchanged
    return _to_tokens(r, out, (batch, length, own[0] * ranks, head_dim))


def _repeated(r: SymbolicRank, x: SymbolicTensor, repeats: int) -> SymbolicTensor:
    batch, length, heads, head_dim = x.shape
    y = r.empty((batch, length, heads * repeats, head_dim), x.element_bytes)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(x),)

    return r.made(y, backward, x)


def _joined(r: SymbolicRank, ranks: int, *inputs: SymbolicTensor) -> SymbolicTensor:
    """Queries, keys and values in one tensor, each rank's heads behind one another."""
    batch, length, _, head_dim = inputs[0].shape
    y = r.empty((batch, length, sum(x.shape[2] for x in inputs), head_dim))
    shapes = [x.shape for x in inputs]

    def backward(gradient: SymbolicTensor) -> Gradients:
        return tuple(r.empty(shape) for shape in shapes)

    return r.made(y, backward, *inputs)


def _split(r: SymbolicRank, x: SymbolicTensor, heads: list[int]) -> list[SymbolicTensor]:
    """Views of some heads, in their order."""
    batch, length, _, head_dim = x.shape

    def backward(*gradients: SymbolicTensor) -> Gradients:
        return (r.empty(shape),)

    shape, strides = x.shape, strides_of(x.shape, x.strides)
    node = r.node(backward, x, outputs=len(heads))
    parts = [(batch, length, own, head_dim) for own in heads]
    return [
        replace(x, shape=part, node=node, output=at, strides=strides)
        for at, part in enumerate(parts)
    ]


def _to_heads(r: SymbolicRank, x: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    """Tokens of all heads to heads of all tokens."""
    before = x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_gathered_heads(r, gradient, before),)

    return r.made(_gathered_tokens(r, x, shape), backward, x)


def _to_tokens(r: SymbolicRank, x: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    """The inverse."""
    before = x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_gathered_tokens(r, gradient, before),)

    received = _gathered_heads(r, x, shape)
    return r.made(replace(r.like(received), strides=None), backward, x)


def _gathered_tokens(r: SymbolicRank, x: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    sent = r.like(x)
    received = _exchanged(r, sent)
    del sent
    one = shape[0] == 1  # sequence: whose tokens lie behind one another as they are received
    return replace(received if one else r.like(x), shape=shape, node=None)


def _gathered_heads(r: SymbolicRank, x: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    sent = x if x.shape[0] == 1 and x.is_contiguous else r.like(x)
    received = _exchanged(r, sent)  # by ranks, each with the heads of its own
    return replace(received, shape=shape, node=None, strides=heads_first_strides(shape))


def _exchanged(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    ranks, dtype = float(r.w.ulysses), r.w.dtype
    r.call_axis(
        AxisCall("context", "context.ulysses", "all_to_all", ranks, dtype, x.bytes, r.action)
    )
    return r.like(x)
