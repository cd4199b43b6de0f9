"""Softmax, norms and sums on shapes."""

from __future__ import annotations

import math
from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.entries.elementwise import multiplied
from workbench.costmodel.traced.entries.pointwise import Entry, Unary, unary
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import cast, computed, expanded, lying, reshaped


def softmax(r: SymbolicRank, x: SymbolicTensor, element_bytes: int) -> SymbolicTensor:
    """Over one dim: the result is saved."""
    if x.element_bytes != element_bytes:
        x = cast(r, x, element_bytes)
    y = r.empty(x.shape, element_bytes)
    saved = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(saved),)

    return r.made(y, backward, x)


def softmax_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Softmax or its logarithm, maybe in another dtype."""
    return [softmax(c.r, c.inputs[0], c.sizes[0])]


def mean(r: SymbolicRank, x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    """Mean over some dims; backward divides the repeated gradient."""
    y, before = r.empty(shape, x.element_bytes), x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.empty(before, gradient.element_bytes),)

    return r.made(y, backward, x)


def mean_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Mean."""
    return [mean(c.r, c.inputs[0], c.shapes[0])]


def sum_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Sum; backward repeats the gradient without a copy."""
    r, (x,), over = c.r, c.inputs, c.argument(1, "dim")
    kept = kept_shape(x.shape, over)
    y = r.empty(c.shapes[0], c.sizes[0])
    before = x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (expanded(r, reshaped(r, gradient, kept), before),)

    return [r.made(y, backward, x)]


def kept_shape(shape: tuple[int, ...], over: object) -> tuple[int, ...]:
    """The shape with reduced dims of length 1."""
    dims = over if isinstance(over, tuple) else (over,)
    at = {d % len(shape) for d in dims if isinstance(d, int)} or {*range(len(shape))}
    return tuple(1 if d in at else n for d, n in enumerate(shape))


def var_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Variance; backward subtracts the mean again."""
    r, (x,) = c.r, c.inputs
    saved, y = x.detached(), r.empty(c.shapes[0], c.sizes[0])

    def backward(gradient: SymbolicTensor) -> Gradients:
        beside = r.like(gradient), r.like(gradient), r.like(saved)
        made = r.like(saved)
        del beside
        return (made,)

    return [r.made(y, backward, x)]


def layer_norm_entry(c: NodeCall) -> list[SymbolicTensor]:
    """LayerNorm: its input and two statistics a row are saved."""
    r, (x, *affine), last = c.r, c.inputs, len(c.node.args[1])
    narrow = r.w.fixed.gpu.device == "cpu" and r.w.fixed.kernels != "compiled"
    width = x.element_bytes if narrow else max(4, x.element_bytes)
    saved, y = x.detached(), r.empty(x.shape, c.sizes[0])
    statistics = r.empty((2, math.prod(x.shape[: len(x.shape) - last])), width)
    shapes = [(p.shape, p.element_bytes) for p in affine]
    needs = x.node is not None

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert statistics is not None
        own = r.empty(saved.shape, saved.element_bytes) if needs else None
        return own, *(r.empty(*each) for each in shapes)

    return [r.made(y, backward, x, *affine)]


def rms_norm_entry(c: NodeCall) -> list[SymbolicTensor]:
    """RMSNorm, operator by operator, in fp32 or better."""
    r, (x, *weight), last = c.r, c.inputs, len(c.node.args[1])
    before = x.element_bytes
    wide = x if before >= 4 else cast(r, x, 4)
    rows = (*x.shape[: len(x.shape) - last], *[1] * last)
    squares = unary(r, wide, Unary("input", 2))
    average = mean(r, squares, rows)
    scale = unary(r, average, Unary("output", 2))
    del squares, average
    y = multiplied(r, wide, scale, x.shape)
    for each in weight:
        y = multiplied(r, y, each, x.shape)
    return [y if y.element_bytes == before else cast(r, y, before)]


def logsumexp_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Logarithm of a sum of exponentials: its input and result are saved."""
    r, (x,) = c.r, c.inputs
    saved, y = x.detached(), r.empty(c.shapes[0], c.sizes[0])
    result = y

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert result is not None
        beside = r.like(saved), r.like(saved)
        made = r.like(saved)
        del beside
        return (made,)

    return [r.made(y, backward, x)]


def one_hot_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A comparison with all classes, cast."""
    r, (x,) = c.r, c.inputs
    classes = r.empty(c.shapes[0][-1:], x.element_bytes)
    equal = r.empty(c.shapes[0], 1)
    y = r.empty(c.shapes[0], c.sizes[0])
    del classes, equal
    return [y]


def triangle_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A triangle of the last two dims."""
    r, (x,) = c.r, c.inputs
    y = replace(r.like(x), strides=lying(x) if x.is_contiguous else None)
    shape, size = x.shape, x.element_bytes
    return [r.made(y, lambda g: (computed(r, shape, size, g),), x)]


REDUCTIONS: dict[str, Entry] = {
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), softmax_entry),
    "mean": mean_entry,
    "sum": sum_entry,
    "var": var_entry,
    "layer_norm": layer_norm_entry,
    "rms_norm": rms_norm_entry,
    "logsumexp": logsumexp_entry,
    "one_hot": one_hot_entry,
    "triu": triangle_entry,
    "tril": triangle_entry,
}
"""Operator -> what it does on shapes."""
