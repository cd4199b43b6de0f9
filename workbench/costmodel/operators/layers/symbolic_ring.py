"""Ring attention on shapes (`parallel/context/ring_attention.py`), on the ring's first rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

from workbench.costmodel.memory.attention_memory import attention_backward_bytes
from workbench.costmodel.operators.symbolic_attention import attended
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import AxisCall, SymbolicRank

Pair = tuple[SymbolicTensor, SymbolicTensor]
"""What a rank has received, and what it has sent; both are held until the next transfer."""


def ring_attend(
    r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor, v: SymbolicTensor
) -> SymbolicTensor:
    """Causal attention of [B, T / ranks, heads, head_dim] to the unsharded sequence."""
    steps, u = int(r.w.ring) - 1, r.w.upcast_bytes
    r.compute("attention", q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])
    transfer = _sent(r, _stacked(r, k))
    full, lse = _block(r, q, k)
    full = full if q.element_bytes == u else r.like(full, u)
    for left in reversed(range(steps)):
        keys = transfer[0]
        transfer = _sent(r, keys) if left else transfer
        block, block_lse = _block(r, _later_half(q), k)
        wide = block if q.element_bytes == u else r.like(block, u)
        _merge(r, wide, block_lse)
        del wide
    y = full if q.element_bytes == u else r.like(q)
    y = replace(y, node=None, strides=None)
    del full, transfer
    out = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert v is not None and out is not None and lse is not None
        return _gradients(r, q, k, steps)

    return r.made(y, backward, q, k, v)


def _gradients(r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor, steps: int) -> Gradients:
    u, e = r.w.upcast_bytes, q.element_bytes
    key_transfer = _sent(r, _stacked(r, k))
    dq, *dkv = _block_backward(r, q, k)
    narrow = dq, _stacked(r, k)
    dq, own = narrow if e == u else (r.like(q, u), r.like(narrow[1], u))
    del narrow
    gradient_transfer: Pair | None = None
    for left in reversed(range(steps)):
        keys = key_transfer[0]
        key_transfer = _sent(r, keys) if left else key_transfer
        part, *dkv = _block_backward(r, _later_half(q), k)
        travelling = r.like(own) if gradient_transfer is None else gradient_transfer[0]
        _stacked(r, k)
        gradient_transfer = _sent(r, travelling)
        del travelling
    del part, dkv
    if e == u:
        return dq, replace(own, shape=k.shape), replace(own, shape=k.shape)
    dk, dv = r.like(k), r.like(k)
    return r.like(q), dk, dv


def _stacked(r: SymbolicRank, k: SymbolicTensor) -> SymbolicTensor:
    """Keys and values in one tensor."""
    return r.empty((2, *k.shape), k.element_bytes)


def _later_half(q: SymbolicTensor) -> SymbolicTensor:
    """The queries that see the keys of a later rank."""
    batch, length, *others = q.shape
    return replace(q, shape=(batch, length // 2, *others))


def _sent(r: SymbolicRank, x: SymbolicTensor) -> Pair:
    received, dtype = r.like(x), r.w.dtype if x.element_bytes == r.w.element_bytes else "fp32"
    link, ranks = "context.ring", float(r.w.ring)
    for kind in ("send", "recv"):
        r.call_axis(AxisCall("context", link, kind, ranks, dtype, x.bytes, r.action))
    return received, x


def _block(r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor) -> Pair:
    """Attention to one block of keys, and its log-sum-exp."""
    repeated = _repeated(r, q, k)
    out, lse = r.like(q), r.empty(q.shape[:-1], r.w.upcast_bytes)
    del repeated
    return out, lse


def _repeated(r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor) -> list[SymbolicTensor]:
    """Keys and values for every query head, which one kernel of GPUs takes alone."""
    on_gpu = r.w.fixed.gpu.device == "cuda"
    if r.w.fixed.attention != "efficient" or not on_gpu or q.shape[2] == k.shape[2]:
        return []
    return [r.empty((*k.shape[:2], *q.shape[2:]), k.element_bytes) for _ in repeat(None, 2)]


def _merge(r: SymbolicRank, block: SymbolicTensor, lse: SymbolicTensor) -> None:
    """Two blocks, each rescaled to their common denominator, and added."""
    common = r.like(lse)
    total = r.like(block)
    part = r.like(block)
    merged = r.like(block)
    del common, total, part, merged


def _block_backward(
    r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor
) -> tuple[SymbolicTensor, ...]:
    repeated = _repeated(r, q, k)
    gradients = 2 * q.bytes + 2 * k.bytes
    workspace = float(attention_backward_bytes(attended(r, q, k))) - gradients
    within = r.tape.allocate(max(0.0, workspace))
    made = r.like(q), r.like(k), r.like(k)
    del within, repeated
    return made
