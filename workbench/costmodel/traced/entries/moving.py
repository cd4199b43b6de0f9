"""Operators that move, copy or make data, on shapes."""

from __future__ import annotations

from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.traced.entries.pointwise import Entry
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import (
    as_complex,
    as_real,
    cast,
    computed,
    contiguous,
    copied,
    expanded,
    joined,
    narrowed,
    permuted,
    reshaped,
    selected,
    split,
    transposed,
    unbound,
)


def _reshape(c: NodeCall) -> list[SymbolicTensor]:
    return [reshaped(c.r, c.inputs[0], c.shapes[0])]


def _transpose(c: NodeCall) -> list[SymbolicTensor]:
    return [transposed(c.r, c.inputs[0], c.dim(1, "dim0"), c.dim(2, "dim1"))]


def _permute(c: NodeCall) -> list[SymbolicTensor]:
    (x,) = c.inputs
    return [permuted(c.r, x, [d % len(x.shape) for d in c.argument(1, "dims")])]


def _t(c: NodeCall) -> list[SymbolicTensor]:
    (x,) = c.inputs
    return [permuted(c.r, x, list(reversed(range(len(x.shape)))))]


def _mT(c: NodeCall) -> list[SymbolicTensor]:
    return [transposed(c.r, c.inputs[0])]


def _as_complex(c: NodeCall) -> list[SymbolicTensor]:
    return [as_complex(c.r, c.inputs[0])]


def _as_real(c: NodeCall) -> list[SymbolicTensor]:
    return [as_real(c.r, c.inputs[0])]


def _pad(c: NodeCall) -> list[SymbolicTensor]:
    """Padding with a number: what backward makes has the shape before."""
    if c.argument(2, "mode", "constant") != "constant":
        c.refused(f"in mode {c.argument(2, 'mode')}")
    r, (x,) = c.r, c.inputs
    before, size = x.shape, x.element_bytes
    return [r.made(r.empty(c.shapes[0], size), lambda g: (r.empty(before, size),), x)]


def _expand(c: NodeCall) -> list[SymbolicTensor]:
    return [expanded(c.r, c.inputs[0], c.shapes[0])]


def _slice(c: NodeCall) -> list[SymbolicTensor]:
    dim = c.dim(1)
    return [narrowed(c.r, c.inputs[0], dim, c.shapes[0][dim], int(c.argument(4, "step", 1)))]


def _select(c: NodeCall) -> list[SymbolicTensor]:
    return [selected(c.r, c.inputs[0], c.dim(1))]


def _unbind(c: NodeCall) -> list[SymbolicTensor]:
    return unbound(c.r, c.inputs[0], c.dim(1))


def _split(c: NodeCall) -> list[SymbolicTensor]:
    dim = c.dim(2)
    return split(c.r, c.inputs[0], dim, [shape[dim] for shape in c.shapes])


def _cat(c: NodeCall) -> list[SymbolicTensor]:
    dim = int(c.argument(1, "dim", 0)) % len(c.shapes[0])
    return [joined(c.r, c.inputs, c.shapes[0], dim, stacked=False)]


def _stack(c: NodeCall) -> list[SymbolicTensor]:
    dim = int(c.argument(1, "dim", 0)) % len(c.shapes[0])
    return [joined(c.r, c.inputs, c.shapes[0], dim, stacked=True)]


def _contiguous(c: NodeCall) -> list[SymbolicTensor]:
    return [contiguous(c.r, c.inputs[0])]


def _clone(c: NodeCall) -> list[SymbolicTensor]:
    kept = c.node.kwargs.get("memory_format", "torch.preserve_format") == "torch.preserve_format"
    return [copied(c.r, c.inputs[0], keeps_order=kept)]


def _to(c: NodeCall) -> list[SymbolicTensor]:
    """A cast; the tensor itself where it has the dtype."""
    same = c.dtypes[0] == c.node.outputs[0].dtype
    if not same and "complex" in c.dtypes[0] + c.node.outputs[0].dtype:
        c.refused("between real and complex numbers")
    return [c.inputs[0]] if same else _cast(c)


def _cast(c: NodeCall) -> list[SymbolicTensor]:
    """A cast; whole numbers and truth values have no gradient."""
    x, real = c.inputs[0], "float" in c.node.outputs[0].dtype
    return [cast(c.r, x if real else x.detached(), c.sizes[0])]


def _same(c: NodeCall) -> list[SymbolicTensor]:
    return [c.inputs[0]]


def _detach(c: NodeCall) -> list[SymbolicTensor]:
    return [c.inputs[0].detached()]


def _like(c: NodeCall) -> list[SymbolicTensor]:
    return [computed(c.r, c.shapes[0], c.sizes[0], c.inputs[0])]


def _made(c: NodeCall) -> list[SymbolicTensor]:
    return [c.r.empty(c.shapes[0], c.sizes[0])]


MOVING: dict[str, Entry] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
        _reshape,
    ),
    "transpose": _transpose,
    "permute": _permute,
    **dict.fromkeys(("t", "numpy_T"), _t),
    "mT": _mT,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
    "pad": _pad,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    "contiguous": _contiguous,
    **dict.fromkeys(("clone", "lift_fresh_copy"), _clone),
    **dict.fromkeys(("to", "type_as"), _to),
    "_to_copy": _cast,
    "alias": _same,
    "detach": _detach,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
    **dict.fromkeys(
        ("full", "zeros", "ones", "arange", "empty", "scalar_tensor", "eye", "linspace"), _made
    ),
}
"""Operator -> what it does on shapes."""
