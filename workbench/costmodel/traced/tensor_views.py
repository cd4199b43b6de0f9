"""Views and copies on shapes, differentiably: what `aten` shares, and what it copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.runtime_facts.tensor_strides import (
    Shape,
    Strides,
    combined_strides,
    strides_of,
    viewed_strides,
)

Back = Callable[[SymbolicTensor], SymbolicTensor]


def lying(x: SymbolicTensor) -> Strides:
    """Strides of a tensor."""
    return strides_of(x.shape, x.strides)


def computed(
    r: SymbolicRank, shape: Sequence[int], element_bytes: int, *inputs: SymbolicTensor
) -> SymbolicTensor:
    """A new tensor that is computed from inputs element by element."""
    strides = combined_strides(tuple(shape), [(x.shape, lying(x)) for x in inputs])
    return replace(r.empty(shape, element_bytes), strides=strides)


def _through(r: SymbolicRank, y: SymbolicTensor, back: Back, x: SymbolicTensor) -> SymbolicTensor:
    def backward(gradient: SymbolicTensor) -> Gradients:
        return (back(gradient),)

    return r.made(y, backward, x)


def reshaped(r: SymbolicRank, x: SymbolicTensor, shape: Sequence[int]) -> SymbolicTensor:
    """A view in another shape; of a copy, where the tensor's strides allow none."""
    if viewed_strides(x.shape, lying(x), tuple(shape)) is None:
        x = copied(r, x)
    strides, before = viewed_strides(x.shape, lying(x), tuple(shape)), x.shape
    y = replace(x, shape=tuple(shape), strides=strides)
    return _through(r, y, lambda g: reshaped(r, g, before), x)


def permuted(r: SymbolicRank, x: SymbolicTensor, order: Sequence[int]) -> SymbolicTensor:
    """A view with its dims in another order."""
    strides = lying(x)
    back = [list(order).index(dim) for dim in range(len(order))]
    y = replace(x, shape=tuple(x.shape[d] for d in order), strides=tuple(strides[d] for d in order))
    return _through(r, y, lambda g: permuted(r, g, back), x)


def as_complex(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """A view as complex numbers, whose parts the last dim is."""
    strides = tuple(stride // 2 for stride in lying(x)[:-1])
    y = replace(x, shape=x.shape[:-1], element_bytes=2 * x.element_bytes, strides=strides)
    return _through(r, y, lambda g: as_real(r, contiguous(r, g)), x)


def as_real(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """A view of complex numbers as their two parts, the last dim."""
    strides = (*(2 * stride for stride in lying(x)), 1)
    y = replace(x, shape=(*x.shape, 2), element_bytes=x.element_bytes // 2, strides=strides)
    return _through(r, y, lambda g: as_complex(r, contiguous(r, g)), x)


def transposed(r: SymbolicRank, x: SymbolicTensor, a: int = -2, b: int = -1) -> SymbolicTensor:
    """A view with two dims swapped."""
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return permuted(r, x, order)


def expanded(r: SymbolicRank, x: SymbolicTensor, shape: Sequence[int]) -> SymbolicTensor:
    """A view that repeats dims of length 1."""
    before, missing = x.shape, len(shape) - len(x.shape)
    strides = [0] * missing
    for own, length, stride in zip(x.shape, shape[missing:], lying(x)):
        strides.append(stride if own == length else 0)
    y = replace(x, shape=tuple(shape), strides=tuple(strides))
    return _through(r, y, lambda g: summed_to(r, g, before), x)


def summed_to(r: SymbolicRank, gradient: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    """A gradient summed over the dims along which its tensor was repeated."""
    return gradient if gradient.shape == shape else r.empty(shape, gradient.element_bytes)


def narrowed(
    r: SymbolicRank, x: SymbolicTensor, dim: int, length: int, step: int = 1
) -> SymbolicTensor:
    """A view of a part of a dim; backward puts the gradient among zeros."""
    before, strides = x.shape, list(lying(x))
    strides[dim] *= step
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    y = replace(x, shape=shape, strides=tuple(strides))
    return _through(r, y, lambda g: r.empty(before, g.element_bytes), x)


def selected(r: SymbolicRank, x: SymbolicTensor, dim: int) -> SymbolicTensor:
    """A view at one index of a dim, which is then gone."""
    before, strides = x.shape, lying(x)
    y = replace(
        x,
        shape=(*x.shape[:dim], *x.shape[dim + 1 :]),
        strides=(*strides[:dim], *strides[dim + 1 :]),
    )
    return _through(r, y, lambda g: r.empty(before, g.element_bytes), x)


def split(
    r: SymbolicRank, x: SymbolicTensor, dim: int, lengths: Sequence[int]
) -> list[SymbolicTensor]:
    """Views of the parts of a dim; backward joins their gradients, zeros where there is none."""
    before, size = x.shape, x.element_bytes
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in lengths]
    return _parts(r, x, [replace(x, shape=s, strides=lying(x)) for s in shapes], before, size)


def unbound(r: SymbolicRank, x: SymbolicTensor, dim: int) -> list[SymbolicTensor]:
    """Views at every index of a dim; backward stacks their gradients."""
    one, before = selected(r, x.detached(), dim), x.shape
    return _parts(r, x, [one] * x.shape[dim], before, x.element_bytes)


def _parts(
    r: SymbolicRank, x: SymbolicTensor, parts: list[SymbolicTensor], before: Shape, size: int
) -> list[SymbolicTensor]:
    shapes = [part.shape for part in parts]

    def backward(*gradients: SymbolicTensor | None) -> Gradients:
        zeros = [r.empty(s, size) for s, g in zip(shapes, gradients) if g is None]
        joined = r.empty(before, size)
        del zeros
        return (joined,)

    node = r.node(backward, x, outputs=len(parts))
    return [replace(part, node=node, output=i) for i, part in enumerate(parts)]


def joined(
    r: SymbolicRank, parts: Sequence[SymbolicTensor], shape: Shape, dim: int, stacked: bool
) -> SymbolicTensor:
    """A new tensor of parts along a dim; gradients of the parts are views."""
    shapes = [part.shape for part in parts]
    y = r.empty(shape, max(part.element_bytes for part in parts))

    def backward(gradient: SymbolicTensor) -> Gradients:
        strides = lying(gradient)
        own = (*strides[:dim], *strides[dim + 1 :]) if stacked else strides
        return tuple(replace(gradient, shape=s, strides=own) for s in shapes)

    return r.made(y, backward, *parts)


def copied(r: SymbolicRank, x: SymbolicTensor, keeps_order: bool = False) -> SymbolicTensor:
    """A copy, with its dims in memory in their order, or in that of `x`."""
    strides = combined_strides(x.shape, [(x.shape, lying(x))]) if keeps_order else None
    return _through(r, replace(r.like(x), strides=strides), lambda g: g, x)


def contiguous(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """`x`, or a copy whose dims lie in memory in their order."""
    return x if x.is_contiguous else copied(r, x)


def cast(r: SymbolicRank, x: SymbolicTensor, element_bytes: int) -> SymbolicTensor:
    """A copy in another dtype."""
    before = x.element_bytes
    y = computed(r, x.shape, element_bytes, x)
    return _through(r, y, lambda g: computed(r, g.shape, before, g), x)


Meta = tuple[Shape, int]
"""Shape of a tensor, and bytes of an element."""


def metas_of(*inputs: SymbolicTensor) -> list[Meta]:
    """What backward knows of each input."""
    return [(x.shape, x.element_bytes) for x in inputs]


def as_inputs(
    r: SymbolicRank, gradients: list[SymbolicTensor | None], metas: Sequence[Meta]
) -> Gradients:
    """The gradients of inputs that the operator has repeated or cast, one after the other."""
    for at, (shape, element_bytes) in enumerate(metas):
        gradient = gradients[at]
        if gradient is not None:
            gradients[at] = gradient = summed_to(r, gradient, shape)
            if gradient.element_bytes != element_bytes:
                gradients[at] = cast(r, gradient, element_bytes)
    return gradients
