"""The operators of a block on shapes: each allocates, saves and frees what the runtime's does
(`models/seams.py`, `models/attention_kernels.py`, `kernels/`).
"""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager, runs_fused_seam
from workbench.costmodel.memory.attention_memory import (
    attention_backward_bytes,
    saved_attention_bytes,
)
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS


def linear(
    r: SymbolicRank,
    path: str,
    x: SymbolicTensor,
    weight: SymbolicTensor,
    bias: SymbolicTensor | None,
) -> SymbolicTensor:
    """x W^T + bias; weight [columns, inner]."""
    rows, (columns, inner) = x.numel // x.shape[-1], weight.shape
    r.saved_by(path)
    y = r.empty((*x.shape[:-1], columns))
    r.compute("linear", rows, columns, inner)
    if bias is not None:
        r.compute("bias", rows * columns, 0)

    def backward(gradient: SymbolicTensor) -> Gradients:
        if r.splits_backward and weight.node is not None and part_is_split(r):
            r.deferred += [x.detached(), gradient]
            return r.like(x), None, None
        if bias is None:
            weight_gradient = r.like(weight)
            return r.like(x), weight_gradient, None
        x_gradient, weight_gradient = r.like(x), r.like(weight)
        return x_gradient, weight_gradient, r.like(bias)

    return r.made(y, backward, x, weight, bias)


def part_is_split(r: SymbolicRank) -> bool:
    """Whether the weight gradients of this part of the stage can be deferred: not the head's."""
    return r.tape.part != "head"


def add(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """x + y, of one shape and layout."""
    total = replace(x, storage=r.like(x).storage)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return gradient, gradient

    return r.made(total, backward, x, y)


def contiguous(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """`x`, or a copy of it whose dims lie in memory in their order."""
    if x.is_contiguous:
        return x

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (gradient,)

    return r.made(replace(x, storage=r.like(x).storage, is_contiguous=True), backward, x)


def view(r: SymbolicRank, x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    """The same storage in another shape, whose last dims alone differ and are not sharded."""
    before = x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_in_shape(gradient, before),)

    return r.made(_in_shape(x, shape), backward, x)


def _in_shape(x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    layout = x.layout
    if layout is not None:
        dims = (*layout.dims, ())[: len(shape)]
        layout = layout._replace(dims=dims)
    return replace(x, shape=shape, layout=layout)


def add_norm(
    r: SymbolicRank,
    parameters: tuple[SymbolicTensor, ...],
    x: SymbolicTensor,
    residual: SymbolicTensor | None,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """(norm of the sum, sum); without a residual the sum is x itself."""
    kind = r.w.shape.norm
    r.compute("norm", x.numel, x.shape[-1], float(residual is not None))
    if _runs_fused(r, kind, x.numel):
        return _fused_norm(r, x, residual, parameters)
    total = x if residual is None else add(r, x, residual)
    normed = _layer_norm if kind == "layernorm" else _rms_norm
    return normed(r, total, parameters), total


def _runs_fused(r: SymbolicRank, kind: str, numel: int) -> bool:
    if keeps_small_seams_eager(r.w) and kind in ATEN_SEAMS:
        return False
    return bool(runs_fused_seam(r.w, float(numel)))


def _fused_norm(
    r: SymbolicRank,
    x: SymbolicTensor,
    residual: SymbolicTensor | None,
    parameters: tuple[SymbolicTensor, ...],
) -> tuple[SymbolicTensor, SymbolicTensor]:
    y, rows = r.like(x), x.numel // x.shape[-1]
    summed = None if residual is None else r.like(x)
    statistics = r.empty((len(parameters), rows), r.w.upcast_bytes)
    saved = x.detached() if summed is None else summed

    def backward(
        gradient: SymbolicTensor | None, _: SymbolicTensor | None = None
    ) -> Gradients:
        assert statistics is not None and saved is not None
        made = r.like(x_like), *(r.like(p) for p in parameters)
        return made[0], made[0], *made[1:]

    x_like = saved
    node = r.node(backward, x, residual, *parameters, outputs=2)
    y = replace(y, node=node)
    return y, x if summed is None else replace(summed, node=node, output=1)


def _rms_norm(
    r: SymbolicRank, x: SymbolicTensor, parameters: tuple[SymbolicTensor, ...]
) -> SymbolicTensor:
    u, rows = r.w.upcast_bytes, (*x.shape[:-1], 1)
    upcast = _upcast(r, x)
    square = r.like(x, u)
    scale = r.empty(rows, u)
    del square
    product = r.like(x, u)
    y = product if u == x.element_bytes else r.like(x)
    del product, upcast
    x, weight = x, parameters[0]

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert scale is not None
        wide = _upcast(r, gradient)
        unit = _unit(r, x)
        weight_gradient = _weight_sum(r, x, weight)
        x_gradient = r.like(x, u)
        projected = r.like(x, u)
        projection = r.empty(rows, u)
        del projected, projection
        result = x_gradient if u == x.element_bytes else r.like(x)
        del wide, unit
        return result, weight_gradient

    return r.made(y, backward, x, weight)


def _upcast(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    return x if x.element_bytes >= r.w.upcast_bytes else r.like(x, r.w.upcast_bytes)


def _unit(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    wide = _upcast(r, x)
    return r.like(wide)


def _weight_sum(r: SymbolicRank, x: SymbolicTensor, weight: SymbolicTensor) -> SymbolicTensor:
    product = r.like(x, r.w.upcast_bytes)
    total = r.like(weight, r.w.upcast_bytes)
    del product
    return total if r.w.upcast_bytes == weight.element_bytes else r.like(weight)


def _layer_norm(
    r: SymbolicRank, x: SymbolicTensor, parameters: tuple[SymbolicTensor, ...]
) -> SymbolicTensor:
    narrow = r.w.fixed.gpu.device == "cpu" and r.w.fixed.kernels != "compiled"
    width = x.element_bytes if narrow else r.w.upcast_bytes
    y = r.like(x)
    statistics = r.empty((2, *x.shape[:-1]), width)

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert statistics is not None
        return r.like(x), *(r.like(p) for p in parameters)

    return r.made(y, backward, x, *parameters)


def rope(
    r: SymbolicRank, tables: SymbolicTensor, q: SymbolicTensor, k: SymbolicTensor
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Queries and keys, rotated; fused kernels overwrite them."""
    r.compute("rope", q.numel, k.numel, q.shape[-1] * (q.shape[-2] + k.shape[-2]))
    if not _runs_fused(r, "rope", q.numel):
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
    y = replace(r.like(q), is_contiguous=q.is_contiguous)  # its layout in memory is the queries'
    kept = r.tape.allocate(float(saved_attention_bytes(own)))
    gradients = q.bytes + k.bytes + v.bytes
    workspace = max(0.0, float(attention_backward_bytes(own)) - q.bytes - gradients)
    out = y
    r.compute("attention", q.shape[0] * q.shape[1], q.shape[2], q.shape[3], k.shape[2])

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert kept is not None and out is not None
        within = r.tape.allocate(workspace)
        made = r.like(q), r.like(k), r.like(v)
        del within
        return made

    return r.made(y, backward, q, k, v)


def attended(r: SymbolicRank, q: SymbolicTensor, k: SymbolicTensor):  # type: ignore[no-untyped-def]
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


def activate(
    r: SymbolicRank, gate: SymbolicTensor, up: SymbolicTensor | None = None
) -> SymbolicTensor:
    """The activation, times `up` where it is gated."""
    kind = r.w.shape.mlp
    r.compute("activation", gate.numel, gate.shape[-1])
    if kind != "relu" and _runs_fused(r, kind, gate.numel):

        def backward(gradient: SymbolicTensor) -> Gradients:
            return r.like(gate), None if up is None else r.like(up)

        return r.made(r.like(gate), backward, gate, up)
    if kind == "relu":
        return _relu(r, gate)
    if up is None:
        r.saved_by("activate")
        return _pointwise(r, gate)
    return _product(r, _pointwise(r, gate), up)


def _relu(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Backward reads the result."""
    y = r.like(x)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(y),)

    return r.made(y, backward, x)


def _pointwise(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Backward reads the input."""

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(x),)

    return r.made(r.like(x), backward, x)


def _product(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    r.saved_by("activate")

    def backward(gradient: SymbolicTensor) -> Gradients:
        return r.like(x), r.like(y)

    return r.made(r.like(x), backward, x, y)
