"""Matrix products on shapes, as `aten` decomposes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.entries.elementwise import added, multiplied
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import (
    expanded,
    lying,
    metas_of,
    permuted,
    reshaped,
    transposed,
)
from workbench.runtime_facts.tensor_strides import viewed_strides


def mm(
    r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor, bias: SymbolicTensor | None = None
) -> SymbolicTensor:
    """x y + bias of matrices: each operand is saved for the other's gradient, which lies as the
    operand does.
    """
    (rows, inner), columns = x.shape, y.shape[1]
    r.compute("linear", rows, columns, inner)
    z = r.empty((rows, columns), x.element_bytes)
    of_x = None if x.node is None else y.detached()
    of_y = None if y.node is None else x.detached()
    of_bias = None if bias is None or bias.node is None else bias.shape
    shapes, strides = (x.shape, y.shape), (lying(x), lying(y))

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = [
            None if other is None else _lying_as(r, shape, own, gradient.element_bytes)
            for other, shape, own in zip((of_x, of_y), shapes, strides)
        ]
        summed = None if of_bias is None else r.empty(of_bias, gradient.element_bytes)
        return (summed, *made)

    return r.made(z, backward, bias, x, y)  # in the order of `addmm`, whose bias is ready first


def _lying_as(
    r: SymbolicRank, shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> SymbolicTensor:
    """A new matrix, by columns where `strides` are a transposed one's."""
    by_columns = strides[0] == 1 and strides[1] == shape[0]
    return replace(r.empty(shape, size), strides=(1, shape[0]) if by_columns else None)


def bmm(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """Products of a batch of matrices."""
    (batch, rows, inner), columns = x.shape, y.shape[2]
    r.compute("linear", batch * rows, columns, inner)
    z = r.empty((batch, rows, columns), x.element_bytes)
    of_x = None if x.node is None else y.detached()
    of_y = None if y.node is None else x.detached()
    shapes = x.shape, y.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return [
            None if other is None else r.empty(shape, gradient.element_bytes)
            for other, shape in zip((of_x, of_y), shapes)
        ]

    return r.made(z, backward, x, y)


def matmul(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """x y, where all dims but the last two are a batch."""
    if len(x.shape) == len(y.shape) == 2:
        return mm(r, x, y)
    if len(y.shape) == 2 and _folds(x, y):
        rows = math.prod(x.shape[:-1])
        z = mm(r, reshaped(r, x, (rows, x.shape[-1])), y)
        return reshaped(r, z, (*x.shape[:-1], y.shape[1]))
    if len(x.shape) == 2 and _folds(transposed(r, y.detached()), x):
        return transposed(r, matmul(r, transposed(r, y), transposed(r, x)))
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    size = math.prod(batch)
    one, other = (
        reshaped(r, expanded(r, z, (*batch, *z.shape[-2:])), (size, *z.shape[-2:])) for z in (x, y)
    )
    shape = (*batch, x.shape[-2], y.shape[-1])
    return reshaped(r, bmm(r, one, other), shape)


def _folds(x: SymbolicTensor, y: SymbolicTensor) -> bool:
    """Whether the batch of `x` becomes rows of one product with a matrix (`should_fold`)."""
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    return y.node is not None or viewed_strides(x.shape, lying(x), rows) is not None


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape to which two broadcast."""
    longest = max(len(a), len(b))
    padded = [(1,) * (longest - len(s)) + tuple(s) for s in (a, b)]
    return tuple(max(x, y) for x, y in zip(*padded))


def linear(
    r: SymbolicRank, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None
) -> SymbolicTensor:
    """x W^T + bias."""
    across, shape = transposed(r, weight), (*x.shape[:-1], weight.shape[0])
    if bias is None:
        return matmul(r, x, across)
    if len(x.shape) == 2 or x.is_contiguous:
        flat = reshaped(r, x, (math.prod(x.shape[:-1]), x.shape[-1]))
        return reshaped(r, mm(r, flat, across, bias), shape)
    return added(r, matmul(r, x, across), bias, shape)


def einsum(r: SymbolicRank, equation: str, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """Two operands, as `aten::einsum` does: a product element by element, or one of matrices."""
    (left, right), output = _terms(equation)
    labels = [*output, *sorted({*left, *right} - {*output}, key=_rank)]
    a, b = (_with_all(r, z, own, labels) for z, own in ((x, left), (y, right)))
    summed = labels[len(output) :]
    if not summed:
        return multiplied(r, a, b, broadcast(a.shape, b.shape))
    return _pair_product(r, a, b, len(output))


def _terms(equation: str) -> tuple[list[str], str]:
    inputs, _, output = equation.replace(" ", "").partition("->")
    return inputs.split(","), output


def _rank(label: str) -> tuple[bool, str]:
    return label.islower(), label


def _with_all(
    r: SymbolicRank, x: SymbolicTensor, own: str, labels: Sequence[str]
) -> SymbolicTensor:
    """An operand with a dim of every label, of length 1 where it lacks it."""
    missing = [label for label in labels if label not in own]
    wide = reshaped(r, x, (*x.shape, *[1] * len(missing)))
    every = [*own, *missing]
    return permuted(r, wide, [every.index(label) for label in labels])


def _pair_product(
    r: SymbolicRank, a: SymbolicTensor, b: SymbolicTensor, kept: int
) -> SymbolicTensor:
    """Sum of products over all dims behind `kept` (`sumproduct_pair`)."""
    both: list[int] = []
    left: list[int] = []
    right: list[int] = []
    summed: list[int] = []
    for dim, (m, n) in enumerate(zip(a.shape, b.shape)):
        if dim >= kept:
            summed.append(dim)
        else:
            (both if m != 1 and n != 1 else left if m != 1 else right).append(dim)
    shape = broadcast(a.shape, b.shape)
    size = [math.prod(shape[d] for d in dims) for dims in (both, left, summed, right)]
    one = reshaped(r, permuted(r, a, [*both, *left, *summed, *right]), (size[0], size[1], size[2]))
    other = permuted(r, b, [*both, *summed, *right, *left])
    result = bmm(r, one, reshaped(r, other, (size[0], size[2], size[3])))
    order = [*both, *left, *summed, *right]
    lengths = [1 if d in summed else shape[d] for d in order]
    result = permuted(r, reshaped(r, result, lengths), [order.index(d) for d in range(len(order))])
    return reshaped(r, result, shape[:kept])


def addmm_entry(c: NodeCall) -> list[SymbolicTensor]:
    """bias + x y."""
    bias, x, y = c.inputs
    if c.node.kwargs:
        c.refused("with scaled terms")
    return [mm(c.r, x, y, bias)]


def matmul_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A product of two tensors with at least two dims."""
    x, y = c.inputs
    if min(len(x.shape), len(y.shape)) < 2:
        c.refused("of a vector")
    return [matmul(c.r, x, y)]


def linear_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A linear layer."""
    x, weight, *bias = c.inputs
    return [linear(c.r, x, weight, bias[0] if bias else None)]


def einsum_entry(c: NodeCall) -> list[SymbolicTensor]:
    """An einsum of two operands, each of whose dims the other or the result has too."""
    equation = str(c.node.args[0])
    if len(c.inputs) != 2 or "." in equation or "->" not in equation:
        c.refused(f"of {equation}")
    (left, right), output = _terms(equation)
    alone = [label for label in left + right if (left + right + output).count(label) == 1]
    if alone or len({*left}) < len(left) or len({*right}) < len(right):
        c.refused(f"of {equation}")
    x, y = c.inputs
    return [einsum(c.r, equation, x, y)]


def conv1d_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A convolution over [N, channels, length]."""
    r, (x, weight, *_) = c.r, c.inputs
    if len(x.shape) != 3 or c.node.overload != "default":
        c.refused("of other than [N, channels, length], or padded to a size")
    channels, inner, kernel = weight.shape
    groups, rows = x.shape[1] // inner, c.shapes[0][0] * c.shapes[0][2]
    r.compute("linear", rows * groups, channels // groups, inner * kernel)
    saved, metas = (x.detached(), weight.detached()), metas_of(*c.inputs)
    needs = [each.node is not None for each in c.inputs]

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert saved
        return [r.empty(*meta) if need else None for meta, need in zip(metas, needs)]

    return [r.made(r.empty(c.shapes[0], c.sizes[0]), backward, *c.inputs)]


def bmm_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A product of two batches of matrices."""
    x, y = c.inputs
    return [bmm(c.r, x, y)]


def outer_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A column times a row, element by element."""
    x, y = c.inputs
    column = reshaped(c.r, x, (*x.shape, 1))
    return [multiplied(c.r, column, y, c.shapes[0], c.sizes[0])]
