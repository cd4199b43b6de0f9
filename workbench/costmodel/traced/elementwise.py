"""Operators that compute element by element, on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import as_input, computed

Entry = Callable[[NodeCall], Sequence[SymbolicTensor]]


@dataclass(frozen=True)
class Unary:
    """An operator of one tensor.

    Attributes:
        saves: Whether backward reads its input or its output, or neither.
        temporaries: Tensors of its size that backward computes beside the gradient.
    """

    saves: str = ""
    temporaries: int = 0

    def __call__(self, c: NodeCall) -> list[SymbolicTensor]:
        """One new tensor."""
        return [unary(c.r, c.inputs[0], self, c.sizes[0])]


def unary(
    r: SymbolicRank, x: SymbolicTensor, kind: Unary, element_bytes: int = 0
) -> SymbolicTensor:
    """The result of an operator of one tensor."""
    y = computed(r, x.shape, element_bytes or x.element_bytes, x)
    saved = {"input": x.detached(), "output": y, "": None}[kind.saves]
    shape, size, count = x.shape, x.element_bytes, kind.temporaries

    def backward(gradient: SymbolicTensor) -> Gradients:
        read = () if saved is None else (saved,)
        beside = [computed(r, shape, size, *read or (gradient,)) for _ in range(count)]
        made = computed(r, shape, size, gradient, *read)
        del beside
        return (made,)

    return r.made(y, backward, x)


def without_gradient(c: NodeCall) -> list[SymbolicTensor]:
    """Comparisons and the like: nothing is differentiated."""
    return [computed(c.r, c.shapes[0], c.sizes[0], *c.inputs)]


def added(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor, shape: tuple[int, ...]) -> (
    SymbolicTensor
):
    """x + y."""
    size = max(x.element_bytes, y.element_bytes)
    metas = [(z.shape, z.element_bytes) for z in (x, y)]
    total = computed(r, shape, size, x, y)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return tuple(as_input(r, gradient, *meta) for meta in metas)

    return r.made(total, backward, x, y)


def add(c: NodeCall) -> list[SymbolicTensor]:
    """A sum; with a number, backward is the identity."""
    if len(c.inputs) == 2:
        return [added(c.r, *c.inputs, c.shapes[0])]
    (x,) = c.inputs
    return [c.r.made(computed(c.r, c.shapes[0], c.sizes[0], x), lambda g: (g,), x)]


def sub(c: NodeCall) -> list[SymbolicTensor]:
    """A difference: the gradient of what is subtracted is negated."""
    if len(c.inputs) < 2:
        return Unary()(c) if c.subtracts_input else add(c)
    r, (x, y) = c.r, c.inputs
    metas = [(z.shape, z.element_bytes) for z in (x, y)]
    both = x.node is not None, y.node is not None

    def backward(gradient: SymbolicTensor) -> Gradients:
        negated = computed(r, gradient.shape, gradient.element_bytes, gradient) if both[1] else None
        own = gradient if both[0] else None
        return as_input(r, own, *metas[0]), as_input(r, negated, *metas[1])

    return [r.made(computed(r, c.shapes[0], c.sizes[0], x, y), backward, x, y)]


def multiplied(
    r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor, shape: tuple[int, ...]
) -> SymbolicTensor:
    """x y: each is saved for the other's gradient."""
    size = max(x.element_bytes, y.element_bytes)
    z = computed(r, shape, size, x, y)
    of_x = None if x.node is None else y.detached()
    of_y = None if y.node is None else x.detached()
    metas = [(each.shape, each.element_bytes) for each in (x, y)]

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = [
            None if other is None else computed(r, shape, size, gradient, other)
            for other in (of_x, of_y)
        ]
        return tuple(as_input(r, g, *meta) for g, meta in zip(made, metas))

    return r.made(z, backward, x, y)


def mul(c: NodeCall) -> list[SymbolicTensor]:
    """A product."""
    if len(c.inputs) == 2:
        return [multiplied(c.r, *c.inputs, c.shapes[0])]
    return Unary()(c)


def div(c: NodeCall) -> list[SymbolicTensor]:
    """A quotient; the gradient of the divisor is -gradient (x / y) / y."""
    if len(c.inputs) < 2:
        return Unary()(c) if not c.divides_number else Unary("output", 2)(c)
    r, (x, y), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas = [(each.shape, each.element_bytes) for each in (x, y)]
    needs = x.node is not None, y.node is not None
    divisor, divided = y.detached(), x.detached() if needs[1] else None

    def backward(gradient: SymbolicTensor) -> Gradients:
        own = computed(r, shape, size, gradient, divisor) if needs[0] else None
        other = None
        if divided is not None:
            beside = [computed(r, shape, size, gradient, divisor) for _ in range(3)]
            other = computed(r, shape, size, gradient, divisor)
            del beside
        return as_input(r, own, *metas[0]), as_input(r, other, *metas[1])

    return [r.made(computed(r, shape, size, x, y), backward, x, y)]


def where(c: NodeCall) -> list[SymbolicTensor]:
    """One or the other of two tensors or numbers."""
    r, (condition, *xs), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    chosen, metas = condition.detached(), [(x.shape, x.element_bytes) for x in xs]
    needs = [x.node is not None for x in xs]

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = [computed(r, shape, size, chosen, gradient) if n else None for n in needs]
        return tuple(as_input(r, g, *meta) for g, meta in zip(made, metas))

    return [r.made(computed(r, shape, size, condition, *xs), backward, *xs)]


def masked_fill(c: NodeCall) -> list[SymbolicTensor]:
    """A tensor with a number where a mask says."""
    r, (x, mask, *_) = c.r, c.inputs
    y = computed(r, c.shapes[0], c.sizes[0], x, mask)
    return [filled(r, x, mask, y)]


def filled(
    r: SymbolicRank, x: SymbolicTensor, mask: SymbolicTensor, y: SymbolicTensor
) -> SymbolicTensor:
    """The node of `masked_fill`, whose result `y` is."""
    kept, shape, size = mask.detached(), x.shape, x.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = computed(r, gradient.shape, gradient.element_bytes, gradient, kept)
        return (as_input(r, made, shape, size),)

    return r.made(y, backward, x)


def pow_(c: NodeCall) -> list[SymbolicTensor]:
    """A power with a number as exponent, or of a number."""
    if isinstance(c.node.args[0], int | float):
        return Unary("output", 1)(c)
    if len(c.inputs) == 1:
        return Unary("" if c.node.args[1] in (0, 1) else "input", 2)(c)
    return c.refused("with a tensor as exponent")


def clamp(c: NodeCall) -> list[SymbolicTensor]:
    """Backward masks what lies outside of the bounds, which are numbers."""
    if len(c.inputs) > 1:
        return c.refused("with tensors as bounds")
    return Unary("input", 1)(c)


COMPARISONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
    *("logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
    *("__and__", "__or__", "__xor__", "floor_divide", "isnan", "isinf"),
)
ELEMENTWISE: dict[str, Entry] = {
    "add": add,
    "sub": sub,
    "rsub": sub,
    "mul": mul,
    "div": div,
    "true_divide": div,
    "where": where,
    "masked_fill": masked_fill,
    "pow": pow_,
    "square": Unary("input", 2),
    "neg": Unary(),
    "relu": Unary("output"),
    "tanh": Unary("output"),
    "sigmoid": Unary("output"),
    "exp": Unary("output"),
    "sqrt": Unary("output", 1),
    "rsqrt": Unary("output", 3),
    "reciprocal": Unary("output", 2),
    "gelu": Unary("input"),
    "silu": Unary("input"),
    "mish": Unary("input"),
    "elu": Unary("input"),
    "leaky_relu": Unary("input"),
    "hardtanh": Unary("input"),
    "softplus": Unary("input"),
    "hardswish": Unary("input"),
    "hardsigmoid": Unary("input"),
    "log": Unary("input"),
    "sin": Unary("input", 1),
    "cos": Unary("input", 2),
    "abs": Unary("input", 1),
    "erf": Unary("input", 4),
    **dict.fromkeys(COMPARISONS, without_gradient),
}
"""Operator -> what it does on shapes."""
