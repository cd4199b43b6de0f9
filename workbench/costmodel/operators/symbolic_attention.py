"""Rotary positions and attention on shapes (`models/seams.py`, `models/attention/`)."""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.attention_memory import (
    attention_backward_bytes,
    saved_attention_bytes,
)
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_functions import runs_fused
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.runtime_facts.tensor_strides import heads_first_strides


def rope(
    r: SymbolicRank, tables: SymbolicTensor, q: SymbolicTensor, k: SymbolicTensor
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Queries and keys, rotated; fused kernels overwrite them."""
    r.compute("rope", q.numel, k.numel, q.shape[-1] * (q.shape[-2] + k.shape[-2]))
    if not runs_fused(r, "rope", q.numel):
        return _rotate(r, q, tables), _rotate(r, k, tables)

    def backward(*gradients: SymbolicTensor) -> Gradients:
        assert tables is not None
        return tuple(r.like(x) for x in gradients)

    node = r.node(backward, q, k, outputs=2)
    return replace(q, node=node, output=0), replace(k, node=node, output=1)


def _rotate(r: SymbolicRank, x: SymbolicTensor, tables: SymbolicTensor) -> SymbolicTensor:
    half = (*x.shape[:-1], x.shape[-1] // 2)
    first = _combined(r, half)
    second = _combined(r, half)
    y = r.like(x)
    del first, second

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert tables is not None
        # Of the second half's sum, then of the first half's difference, each added to the other's.
        to_first, to_second = r.empty(half), r.empty(half)
        negative = r.empty(half)
        more_to_second = r.empty(half)
        del negative
        sum_second = r.empty(half)
        del to_second, more_to_second
        more_to_first = r.empty(half)
        sum_first = r.empty(half)
        del to_first, more_to_first
        result = r.like(gradient)
        del sum_first, sum_second
        return (result,)

    return r.made(y, backward, x)


def _combined(r: SymbolicRank, shape: tuple[int, ...]) -> SymbolicTensor:
    products = r.empty(shape), r.empty(shape)
    result = r.empty(shape)
    del products
    return result


def attend(
    r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor, v: SymbolicTensor
) -> SymbolicTensor:
    """Causal attention of [B, T, heads, head_dim]; what its kernels keep and need besides is
    `memory/attention_memory.py`'s.
    """
    own = attended(r, q, k)
    # Its layout in memory is the queries'; of math, heads lie before tokens, and it is not kept.
    is_math = r.w.fixed.attention == "math"
    y = replace(r.like(q), strides=heads_first_strides(q.shape) if is_math else q.strides)
    kept = r.tape.allocate(float(saved_attention_bytes(own)))
    gradients = q.bytes + k.bytes + v.bytes
    workspace = max(0.0, float(attention_backward_bytes(own)) - q.bytes - gradients)
    out = None if is_math else y
    r.compute("attention", q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert kept is not None and (is_math or out is not None)
        within = r.tape.allocate(workspace)
        made = r.like(q), r.like(k), r.like(v)
        del within
        return made

    return r.made(y, backward, q, k, v)


def attended(r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor) -> Workload:
    """The problem sizes of attention to these queries and keys."""
    width, keys = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]
    return replace(
        r.w,
        tokens=float(q.shape[0] * q.shape[1]),
        heads=float(q.shape[2]),
        q_width=float(width),
        o_width=float(width),
        k_width=float(keys),
        v_width=float(keys),
    )
