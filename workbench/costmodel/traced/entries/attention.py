"""Attention and dropout of traced modules on shapes (`parallel/operators/sharded_dropout.py`)."""

from __future__ import annotations

import math

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.entries.elementwise import added, filled
from workbench.costmodel.traced.entries.pointwise import Unary, unary
from workbench.costmodel.traced.entries.products import broadcast, matmul
from workbench.costmodel.traced.entries.reductions import softmax
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import (
    cast,
    computed,
    expanded,
    permuted,
    reshaped,
    transposed,
)
from workbench.plan.operators.traced.traced_graph import drop_rate

INDEX_BYTES, BITS_BYTES = 8, 4
"""Of an element's index; of the random number that is drawn for it."""


def dropout_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Dropout; the tensor itself where nothing is dropped."""
    if not drop_rate(c.node) or not c.argument(2, "train", True):
        return [c.inputs[0]]
    return [dropped(c.r, c.inputs[0])]


def dropped(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Dropout whose mask backward draws again: indices of rows and columns are saved."""
    rows = r.empty((x.numel // x.shape[-1],), INDEX_BYTES)
    columns = r.empty(x.shape[-1:], INDEX_BYTES)
    y = _masked(r, x)

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert rows is not None and columns is not None
        return (_masked(r, gradient),)

    return r.made(y, backward, x)


def _masked(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    keys = r.empty((x.numel // x.shape[-1],), INDEX_BYTES)
    bits = r.empty(x.shape, BITS_BYTES)
    scratch = r.empty(x.shape, BITS_BYTES)
    del scratch, keys
    kept = r.empty(x.shape, 1)
    product = computed(r, x.shape, x.element_bytes, x, kept)
    result = computed(r, x.shape, x.element_bytes, product)
    del product, bits
    return result


def attention_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Scaled dot-product attention: fused, or with dropout its scores in memory."""
    if drop_rate(c.node):
        return [_attention_with_dropout(c)]
    r, (q, k, v, *mask) = c.r, c.inputs
    if c.argument(7, "enable_gqa", False) or any(len(x.shape) != 4 for x in (q, k, v)):
        c.refused("of other than [B, heads, T, depth]")
    if q.shape[-1] != v.shape[-1] or any(m.node is not None for m in mask):
        c.refused("of unlike widths, or with a trained mask")
    if mask and mask[0].element_bytes == 1:  # as numbers to add
        mask = [r.empty(mask[0].shape, q.element_bytes)]
    y = computed(r, q.shape, q.element_bytes, q)
    sums = r.empty(q.shape[:3], max(4, q.element_bytes))
    scores = math.prod(q.shape[:3]) * k.shape[2]
    r.compute("linear", scores // k.shape[2], k.shape[2], 2 * q.shape[3])
    saved = [x.detached() for x in (q, k, v, *mask, y)]
    needs = [x.node is not None for x in (q, k, v)]

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert sums is not None
        made = [_by_heads(r, x) for x in saved[:3]]
        return [x if need else None for x, need in zip(made, needs)]

    return [r.made(y, backward, q, k, v)]


def _by_heads(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """A new tensor [B, heads, T, depth] that lies as [B, T, heads, depth]."""
    batch, heads, length, depth = x.shape
    return transposed(r, r.empty((batch, length, heads, depth), x.element_bytes), 1, 2)


def _attention_with_dropout(c: NodeCall) -> SymbolicTensor:
    r, (query, key, value, *mask) = c.r, c.inputs
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (_repeated(r, x, group) for x in (key, value))
    scores = unary(r, matmul(r, query, transposed(r, key)), Unary())
    if c.argument(5, "is_causal", False):
        ones = r.empty(scores.shape[-2:], 1)
        seen = r.empty(scores.shape[-2:], 1)
        del ones
        scores = _filled(r, scores, r.like(seen))
    for each in mask:
        if each.element_bytes == 1:
            scores = _filled(r, scores, computed(r, each.shape, 1, each))
        else:
            scores = added(r, scores, each, broadcast(scores.shape, each.shape))
    wide = scores if scores.element_bytes >= 4 else cast(r, scores, 4)
    weights = softmax(r, wide, wide.element_bytes)
    if weights.element_bytes != scores.element_bytes:
        weights = cast(r, weights, scores.element_bytes)
    return matmul(r, dropped(r, weights), value)


def _filled(r: SymbolicRank, x: SymbolicTensor, mask: SymbolicTensor) -> SymbolicTensor:
    return filled(r, x, mask, computed(r, x.shape, x.element_bytes, x, mask))


def _repeated(r: SymbolicRank, x: SymbolicTensor, times: int) -> SymbolicTensor:
    """Heads, each several times in a row (`repeat_interleave`)."""
    batch, heads, length, depth = x.shape
    wide = expanded(
        r, reshaped(r, x, (batch, heads, 1, length, depth)), (batch, heads, times, length, depth)
    )
    return reshaped(r, permuted(r, wide, range(5)), (batch, heads * times, length, depth))
