"""The embedding, and the head with its loss, on shapes."""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.memory.activation_memory import TOKEN_ID_BYTES, keeps_small_seams_eager
from workbench.costmodel.operators.redistribution_shapes import redistributed
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_functions import linear
from workbench.costmodel.operators.symbolic_modules import TOKEN_DIMS, SymbolicStrategies
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.operators.symbolic_sharding import (
    ShapeSharding,
    SharedShapes,
    as_shard,
    redistribute,
    unsharded,
)
from workbench.plan.operators.operator_sites import POSITIONS
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.runtime_facts.fused_thresholds import MIN_FUSED_LOSS_NUMEL


def lookup(
    r: SymbolicRank, tokens: SymbolicTensor, table: SymbolicTensor, is_split: bool
) -> SymbolicTensor:
    """Embedding lookup of [B, T]; of a vocabulary's part, other tokens are 0."""
    shape = (*tokens.shape, table.shape[1])
    r.compute("lookup", tokens.numel * table.shape[1], table.numel, float(is_split))
    if not is_split:
        return _table_rows(r, tokens, table, shape)
    below, above = r.empty(tokens.shape, 1), r.empty(tokens.shape, 1)
    absent = r.empty(tokens.shape, 1)
    del below, above
    local = r.empty(tokens.shape, TOKEN_ID_BYTES)
    rows = _table_rows(r, local, table, shape)
    y = r.empty(shape)

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert absent is not None
        return (r.like(gradient),)

    return r.made(y, backward, rows)


def _table_rows(
    r: SymbolicRank, tokens: SymbolicTensor, table: SymbolicTensor, shape: tuple[int, ...]
) -> SymbolicTensor:
    rows, size = table.shape, table.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert tokens is not None
        return (r.empty(rows, size),)

    return r.made(r.empty(shape), backward, table)


def embed(s: SymbolicStrategies, tokens: SymbolicTensor, table: SymbolicTensor) -> SymbolicTensor:
    """The token embedding, sharded by rows, tokens, vocabulary or width."""
    sharding = s.of("embedding.tokens")
    if sharding is None:
        return lookup(s.r, tokens, table, False)
    local = sharding.to_local(tokens, **TOKEN_DIMS)
    x = lookup(s.r, local, table, "vocabulary" in sharding.placement)
    x = sharding.reduce_partial(x, **TOKEN_DIMS, hidden=-1)
    return sharding.to_global(x, **TOKEN_DIMS, hidden=-1)


def embed_positions(
    s: SymbolicStrategies, indices: SymbolicTensor, table: SymbolicTensor
) -> SymbolicTensor:
    """Rows [T, D] of learned positions: of the tokens that a rank has, if these are sharded."""
    own, dims = s.of(POSITIONS), {"tokens": 0}
    if own is None:
        return lookup(s.r, indices, table, False)
    rows = lookup(s.r, own.to_local(indices, **dims), table, False)
    return as_shard(s.r, rows, own.layout(2, dims), own.partial_layout(2, dims))


def add_positions(r: SymbolicRank, x: SymbolicTensor, rows: SymbolicTensor) -> SymbolicTensor:
    """[B, T, D] with the rows of learned positions [T, D] added."""
    r.compute("positions", x.numel)
    if x.layout is None:
        return _broadcast_sum(r, x, rows, rows.shape, None)
    batch, *others = x.layout.dims
    rows = rows if rows.layout is not None else as_shard(r, rows, unsharded(2))
    held, own = rows.layout or unsharded(2), TensorLayout(tuple(others))
    shape = redistributed(r, replace(rows, layout=None), held, own).shape
    return _broadcast_sum(r, x, rows, shape, own._replace(partial=tuple(sorted(batch))))


def _broadcast_sum(
    r: SymbolicRank,
    x: SymbolicTensor,
    rows: SymbolicTensor,
    shape: tuple[int, ...],
    layout: TensorLayout | None,
) -> SymbolicTensor:
    """[B, T, D] plus [T, D], whose gradient of this `shape` is summed over B and lies as `layout`
    says.
    """

    def backward(gradient: SymbolicTensor) -> Gradients:
        return gradient, replace(r.empty(shape), layout=layout)

    return r.made(replace(x, storage=r.like(x).storage), backward, x, rows)


def head_loss(
    s: SymbolicStrategies, x: SymbolicTensor, targets: SymbolicTensor, weight: SymbolicTensor
) -> SymbolicTensor:
    """The head's GEMM sharded by its strategy, and its loss by rows, tokens or vocabulary."""
    r = s.r
    sharding = s.of("head") or s.replicate("head")
    own = {"rows": "rows", "tokens": "tokens", "columns": "vocabulary"}
    follows = tuple(own.get(name or "") for name in sharding.placement)
    loss = replace(sharding, placement=s.placements.get("head.loss", follows))
    projected = _projected(sharding, x, weight)
    logits = sharding.reduce_partial(projected, **TOKEN_DIMS, columns=-1)
    held = sharding.layout(3, TOKEN_DIMS | {"columns": 2})
    wanted = loss.layout(3, TOKEN_DIMS | {"vocabulary": 2})
    logits = redistribute(r, logits, held, wanted)
    axes = tuple(a for a, name in enumerate(loss.placement) if name == "vocabulary")
    fused = _runs_fused(r, logits)
    if (axes or fused) and logits.storage is not projected.storage:
        logits = clone(r, logits)
    targets = loss.to_local(targets, **TOKEN_DIMS)
    if axes or fused:
        total = (_fused_loss if fused else split_loss)(r, logits, targets, axes)
    else:
        total = _eager_loss(r, logits, targets)
    return loss.only(*TOKEN_DIMS).reduce_partial(total)


def _projected(
    sharding: ShapeSharding, x: SymbolicTensor, weight: SymbolicTensor
) -> SymbolicTensor:
    """The GEMM of the head, which alone reads its input."""
    own = replace(sharding, shared=SharedShapes())
    local = own.to_local(x, **TOKEN_DIMS, inner=-1)
    return linear(sharding.r, "head", local, weight, None, own.gathered(local))


def _runs_fused(r: SymbolicRank, logits: SymbolicTensor) -> bool:
    small = keeps_small_seams_eager(r.w) and logits.numel < MIN_FUSED_LOSS_NUMEL
    return r.w.uses_fused_kernels and not small


def clone(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    def backward(gradient: SymbolicTensor) -> Gradients:
        return (gradient,)

    return r.made(r.like(x), backward, x)


def split_loss(
    r: SymbolicRank, logits: SymbolicTensor, targets: SymbolicTensor, axes: tuple[int, ...]
) -> SymbolicTensor:
    """Vocabulary-parallel cross entropy in place of the logits."""
    tokens, u = targets.numel, r.w.upcast_bytes
    r.compute("loss", logits.numel, logits.shape[-1], 1)
    wide = logits if logits.element_bytes == u else r.like(logits, u)
    highest = r.empty((tokens,), u)
    r.call("all_reduce", axes, "fp32", highest.bytes)
    local = r.empty((tokens,), TOKEN_ID_BYTES)
    mine = r.empty((tokens,), 1)
    target = r.empty((tokens,), u)
    sums = r.empty((2, tokens), u)
    r.call("all_reduce", axes, "fp32", sums.bytes)
    valid = r.empty((tokens,), 1)
    losses = r.empty((2, tokens), u)
    del highest, target, losses, sums
    narrow = logits.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert local is not None and mine is not None and valid is not None
        factors = r.empty((2, tokens), u)
        del factors
        return (wide.detached() if narrow == u else r.like(wide, narrow),)

    return r.made(r.empty((), u), backward, logits)


def _fused_loss(
    r: SymbolicRank, logits: SymbolicTensor, targets: SymbolicTensor, axes: tuple[int, ...]
) -> SymbolicTensor:
    """Fused cross entropy: its gradient overwrites the logits."""
    tokens, u = targets.numel, r.w.upcast_bytes
    r.compute("loss", logits.numel, logits.shape[-1], float(bool(axes)))
    found = r.empty((3, tokens), u)
    if axes:
        r.call("all_reduce", axes, "fp32", tokens * u)
        r.call("all_reduce", axes, "fp32", 2 * tokens * u)
    log_sum = r.empty((tokens,), u)
    del found

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert log_sum is not None and targets is not None
        return (logits.detached(),)

    return r.made(r.empty((), u), backward, logits)


def _eager_loss(r: SymbolicRank, logits: SymbolicTensor, targets: SymbolicTensor) -> SymbolicTensor:
    """`F.cross_entropy` of logits in fp32 or better: log-softmax and the negative likelihood."""
    u, narrow = r.w.upcast_bytes, logits.element_bytes
    r.compute("loss", logits.numel, logits.shape[-1], 0)
    wide = logits if narrow == u else r.like(logits, u)
    shape = logits.shape
    probabilities = r.like(wide)
    del wide

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert targets is not None
        likelihood = r.like(probabilities)
        made = r.like(probabilities)
        del likelihood
        return (made if narrow == u else r.empty(shape, narrow),)

    return r.made(r.empty((), u), backward, logits)
