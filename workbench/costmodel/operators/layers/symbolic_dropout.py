"""Dropout on shapes, whose masks are a hash of the tokens' ids (`models/counter_dropout.py`)."""

from __future__ import annotations

from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_modules import TOKEN_DIMS
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.operators.symbolic_sharding import ShapeSharding, SharedShapes
from workbench.runtime_facts.cast_sizes import DROPOUT_CHUNK_NUMEL

ROW_BYTES = 8
"""Bytes of an int64 id of a token."""
BITS_BYTES = 4
"""Bytes of the random bits of an element."""


def dropped(r: SymbolicRank, x: SymbolicTensor, rows: SymbolicTensor | None) -> SymbolicTensor:
    """Dropout of [B, T, D], sharded as it is; `rows` [B, T] are the ids of all its tokens."""
    if rows is None:
        return x
    if x.layout is None:
        return _dropout(r, x, rows)
    names = {0: "rows", 1: "tokens", len(x.shape) - 1: "width"}
    at = x.layout.at(len(r.sides))
    placement = tuple(None if dim is None else names.get(dim) for dim in at)
    sharding = ShapeSharding(r, placement, SharedShapes())
    local = sharding.to_local(x, **TOKEN_DIMS, width=-1)
    y = _dropout(r, local, sharding.to_local(rows, **TOKEN_DIMS))
    return sharding.to_global(y, **TOKEN_DIMS, width=-1)


def _dropout(r: SymbolicRank, x: SymbolicTensor, rows: SymbolicTensor) -> SymbolicTensor:
    r.compute("dropout", x.numel)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_drawn_and_dropped(r, gradient, rows),)

    return r.made(_drawn_and_dropped(r, x, rows), backward, x)


def _drawn_and_dropped(r: SymbolicRank, x: SymbolicTensor, rows: SymbolicTensor) -> SymbolicTensor:
    """Some rows at a time; fused kernels draw in registers."""
    y = r.like(x)
    if r.w.uses_fused_kernels and not keeps_small_seams_eager(r.w):
        return y
    keys = r.empty(rows.shape, ROW_BYTES)
    shape = min(rows.numel, max(1, DROPOUT_CHUNK_NUMEL // x.shape[-1])), x.shape[-1]
    bits, scratch = r.empty(shape, BITS_BYTES), r.empty(shape, BITS_BYTES)
    del scratch
    mask = r.empty(shape, 1)
    del bits, mask, keys
    return y
