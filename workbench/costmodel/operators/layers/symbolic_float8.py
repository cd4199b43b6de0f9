"""Linear layers whose GEMMs are fp8, on shapes (`parallel/float8/float8_linear.py`): torchao casts
each operand by plain operators, and again for every GEMM that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import AxisCall, SymbolicRank
from workbench.plan.operators.strategy_form import Placement

NARROW, WIDE = 1, 4
"""Bytes of an element in fp8, and of what is cast to it."""
SHARDED_DIMS = {
    "input": ("rows", "tokens", "inner"),
    "weight": ("inner", "columns"),
    "gradient": ("rows", "tokens", "columns"),
}
"""Operand -> dimensions of which ranks may hold parts."""


def float8_linear(
    r: SymbolicRank, path: str, placement: Placement, x: SymbolicTensor, weight: SymbolicTensor
) -> SymbolicTensor:
    """x W^T; weight [columns, inner]."""
    rows, (columns, inner) = x.numel // x.shape[-1], weight.shape
    _scales(r, placement, {"input": x, "weight": weight})
    operands = _cast(r, x), _cast(r, weight)
    y = _product(r, operands, (*x.shape[:-1], columns))
    del operands
    r.compute("float8 linear", rows, columns, inner)
    r.saved_by(path)

    def backward(gradient: SymbolicTensor) -> Gradients:
        _scales(r, placement, {"gradient": gradient})
        operands = _cast(r, gradient), _cast(r, weight)
        reordered = r.like(operands[1])
        to_x = _product(r, operands, x.shape)
        del operands, reordered
        operands = _cast(r, gradient), _cast(r, x)
        both = [r.like(each) for each in operands]
        to_weight = _product(r, operands, weight.shape)
        del operands, both
        return to_x, to_weight

    return r.made(y, backward, x, weight)


def _scales(r: SymbolicRank, placement: Placement, operands: dict[str, SymbolicTensor]) -> None:
    """Scales of operands, from the largest entries of all ranks that hold parts of them."""
    for x in operands.values():
        r.like(x)
    held = [_axes(placement, role) for role in operands]
    for axis in dict.fromkeys(axis for axes in held for axis in axes):
        r.call("all_reduce", (axis,), "fp32", WIDE * sum(axis in axes for axes in held))
    of_tokens = sum(role != "weight" for role in operands)
    if (ranks := float(r.w.searched.context)) > 1 and of_tokens:
        size = WIDE * of_tokens
        r.call_axis(AxisCall("context", "", "all_reduce", ranks, "fp32", size, r.action))


def _axes(placement: Placement, role: str) -> Sequence[int]:
    return [axis for axis, name in enumerate(placement) if name in SHARDED_DIMS[role]]


def _cast(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """To fp32, times the scale, clamped, to 8 bits."""
    wide = x if x.element_bytes == WIDE else r.like(x, WIDE)
    scaled = r.like(x, WIDE)
    del wide
    clamped = r.like(x, WIDE)
    bits = r.like(x, NARROW)
    del scaled, clamped
    return bits


def _product(
    r: SymbolicRank, operands: tuple[SymbolicTensor, SymbolicTensor], shape: tuple[int, ...]
) -> SymbolicTensor:
    """The GEMM; a CPU, which has none, multiplies in fp32."""
    if r.w.fixed.gpu.device == "cuda":
        return r.empty(shape)
    wide = []
    for x in operands:
        upcast = r.like(x, WIDE)
        wide.append(r.like(x, WIDE))
        del upcast
    result = r.empty(shape, WIDE)
    del wide
    return result if r.w.element_bytes == WIDE else r.empty(shape)
