"""Extremes, sorted and cumulative results of one tensor, on shapes."""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.traced.entries.elementwise import larger
from workbench.costmodel.traced.entries.pointwise import Entry
from workbench.costmodel.traced.entries.reductions import kept_shape
from workbench.costmodel.traced.node_call import NodeCall

COUNT_BYTES = 8
"""Bytes of a count of entries, or of a position."""


def cumsum_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Cumulative sum; backward flips, sums and flips."""
    r, (x,) = c.r, c.inputs
    shape, size = x.shape, x.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        beside = [r.empty(shape, size) for _ in range(2)]
        made = r.empty(shape, size)
        del beside
        return (made,)

    return [r.made(r.empty(c.shapes[0], c.sizes[0]), backward, x)]


def ordered_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Top-k or sort: the indices are saved, and backward scatters the gradient into zeros."""
    r, (x,) = c.r, c.inputs
    values, indices = (r.empty(s, n) for s, n in zip(c.shapes, c.sizes))
    shape, size, kept = x.shape, x.element_bytes, indices

    def backward(gradient: SymbolicTensor | None, _: SymbolicTensor | None) -> Gradients:
        assert kept is not None
        zeros = r.empty(shape, size)
        made = r.empty(shape, size)
        del zeros
        return (made,)

    return [replace(values, node=r.node(backward, x, outputs=2)), indices]


def most_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Maximum or minimum: along a dim with its index, of all entries, or of two tensors."""
    if c.node.overload == "other":
        return larger(c)
    return ordered_entry(c) if c.node.overload == "dim" else extreme_of_all(c)


def extreme_of_all(c: NodeCall) -> list[SymbolicTensor]:
    """The largest or least of all entries: equal ones share the gradient, NaNs among them."""
    r, (x,) = c.r, c.inputs
    saved, y, size = x.detached(), r.empty((), c.sizes[0]), x.element_bytes
    result = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert result is not None
        beside = [r.empty(saved.shape, 1) for _ in range(3)]
        beside += [r.empty((), each) for each in (1, COUNT_BYTES, size)]
        made = r.empty(saved.shape, size)
        del beside
        return (made,)

    return [r.made(y, backward, x)]


def index_entry(c: NodeCall) -> list[SymbolicTensor]:
    """The index of the largest or least entry: nothing is differentiated."""
    return [c.r.empty(c.shapes[0], c.sizes[0])]


def argsort_entry(c: NodeCall) -> list[SymbolicTensor]:
    """The order of the entries: what is sorted beside is not kept."""
    r, (x,) = c.r, c.inputs
    values = r.empty(x.shape, x.element_bytes)
    order = r.empty(c.shapes[0], c.sizes[0])
    del values
    return [order]


def extreme_entry(c: NodeCall) -> list[SymbolicTensor]:
    """The largest or least entry over some dims: equal ones share the gradient."""
    r, (x,) = c.r, c.inputs
    kept, size = kept_shape(x.shape, c.argument(1, "dim", ())), x.element_bytes
    saved, y = x.detached(), r.empty(c.shapes[0], c.sizes[0])
    result = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert result is not None
        beside = r.empty(saved.shape, 1), r.empty(kept, COUNT_BYTES), r.empty(kept, size)
        made = r.empty(saved.shape, size)
        del beside
        return (made,)

    return [r.made(y, backward, x)]


def cumprod_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Cumulative product. Backward is torch's for entries that may be zero, which fake tensors do
    not say; where none is, it needs less.
    """
    r, (x,), dim = c.r, c.inputs, c.dim(1)
    saved, y, size = x.detached(), r.empty(c.shapes[0], c.sizes[0]), x.element_bytes
    one = tuple(1 if at == dim else n for at, n in enumerate(x.shape))
    result = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert result is not None
        beside = [r.empty(saved.shape, each) for each in (*[size] * 7, *[1] * 3)]
        beside += [r.empty(one, each) for each in (*[size] * 3, COUNT_BYTES)]
        made = r.empty(saved.shape, size)
        del beside
        return (made,)

    return [r.made(y, backward, x)]


ORDERED: dict[str, Entry] = {
    "cumsum": cumsum_entry,
    "cumprod": cumprod_entry,
    **dict.fromkeys(("topk", "sort"), ordered_entry),
    **dict.fromkeys(("argmax", "argmin"), index_entry),
    "argsort": argsort_entry,
    **dict.fromkeys(("amax", "amin"), extreme_entry),
    **dict.fromkeys(("max", "min"), most_entry),
}
"""Operator -> what it does on shapes."""
