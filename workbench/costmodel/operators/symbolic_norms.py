"""The add_norm seam on shapes, eager and fused."""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_functions import add, runs_fused
from workbench.costmodel.operators.symbolic_rank import SymbolicRank


def add_norm(
    r: SymbolicRank,
    parameters: tuple[SymbolicTensor, ...],
    x: SymbolicTensor,
    residual: SymbolicTensor | None,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """(norm of the sum, sum); without a residual the sum is x itself."""
    kind = r.w.shape.norm
    r.compute("norm", x.numel, x.shape[-1], float(residual is not None))
    if runs_fused(r, kind, x.numel):
        return _fused_norm(r, x, residual, parameters)
    total = x if residual is None else add(r, x, residual)
    normed = _layer_norm if kind == "layernorm" else _rms_norm
    return normed(r, total, parameters), total


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

    def backward(gradient: SymbolicTensor | None, _: SymbolicTensor | None = None) -> Gradients:
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
