"""Operators that compute element by element, on shapes."""

from __future__ import annotations

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.entries.pointwise import Entry, Unary
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import as_inputs, computed, metas_of


def without_gradient(c: NodeCall) -> list[SymbolicTensor]:
    """Comparisons and the like: nothing is differentiated."""
    return [computed(c.r, c.shapes[0], c.sizes[0], *c.inputs)]


def added(
    r: SymbolicRank,
    x: SymbolicTensor,
    y: SymbolicTensor,
    shape: tuple[int, ...],
    element_bytes: int = 0,
) -> SymbolicTensor:
    """x + y."""
    size = element_bytes or max(x.element_bytes, y.element_bytes)
    metas, needs = metas_of(x, y), (x.node is not None, y.node is not None)
    total = computed(r, shape, size, x, y)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return as_inputs(r, [gradient if need else None for need in needs], metas)

    return r.made(total, backward, x, y)


def add(c: NodeCall) -> list[SymbolicTensor]:
    """A sum; with a number, backward is the identity."""
    if len(c.inputs) == 2:
        x, y = c.inputs
        return [added(c.r, x, y, c.shapes[0], c.sizes[0])]
    (x,) = c.inputs
    return [c.r.made(computed(c.r, c.shapes[0], c.sizes[0], x), lambda g: (g,), x)]


def sub(c: NodeCall) -> list[SymbolicTensor]:
    """A difference: the gradient of what is subtracted is negated."""
    if len(c.inputs) < 2:
        return Unary()(c) if c.subtracts_input else add(c)
    r, (x, y) = c.r, c.inputs
    metas = metas_of(x, y)
    both = x.node is not None, y.node is not None

    def backward(gradient: SymbolicTensor) -> Gradients:
        negated = computed(r, gradient.shape, gradient.element_bytes, gradient) if both[1] else None
        return as_inputs(r, [gradient if both[0] else None, negated], metas)

    return [r.made(computed(r, c.shapes[0], c.sizes[0], x, y), backward, x, y)]


def multiplied(
    r: SymbolicRank,
    x: SymbolicTensor,
    y: SymbolicTensor,
    shape: tuple[int, ...],
    element_bytes: int = 0,
    conjugates: bool = False,
) -> SymbolicTensor:
    """x y: each is saved for the other's gradient, and conjugated first where it is complex."""
    size = element_bytes or max(x.element_bytes, y.element_bytes)
    z = computed(r, shape, size, x, y)
    of_x = None if x.node is None else y.detached()
    of_y = None if y.node is None else x.detached()
    metas = metas_of(x, y)

    def backward(gradient: SymbolicTensor) -> Gradients:
        made: list[SymbolicTensor | None] = []
        for other in (of_y, of_x):  # as torch does
            factor = computed(r, other.shape, size, other) if other and conjugates else other
            made.insert(0, None if factor is None else computed(r, shape, size, gradient, factor))
            del factor
        return as_inputs(r, made, metas)

    return r.made(z, backward, x, y)


def mul(c: NodeCall) -> list[SymbolicTensor]:
    """A product."""
    if len(c.inputs) == 2:
        x, y = c.inputs
        kinds = [dtype.startswith("torch.complex") for dtype in c.dtypes]
        if any(kinds) and any(t.node and not kind for t, kind in zip(c.inputs, kinds)):
            c.refused("of complex numbers and real ones that are trained")
        return [multiplied(c.r, x, y, c.shapes[0], c.sizes[0], all(kinds))]
    return Unary()(c)


def div(c: NodeCall) -> list[SymbolicTensor]:
    """A quotient; the gradient of the divisor is -gradient (x / y) / y."""
    if len(c.inputs) < 2:
        return Unary()(c) if not c.divides_number else Unary("output", 2)(c)
    r, (x, y), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas = metas_of(x, y)
    needs = x.node is not None, y.node is not None
    divisor, divided = y.detached(), x.detached() if needs[1] else None

    def backward(gradient: SymbolicTensor) -> Gradients:
        own = computed(r, shape, size, gradient, divisor) if needs[0] else None
        other = None
        if divided is not None:
            beside = [computed(r, shape, size, gradient, divisor) for _ in range(2)]
            other = computed(r, shape, size, gradient, divisor)
            del beside
        return as_inputs(r, [own, other], metas)

    return [r.made(computed(r, shape, size, x, y), backward, x, y)]


def where(c: NodeCall) -> list[SymbolicTensor]:
    """One or the other of two tensors or numbers."""
    r, (condition, *xs), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    chosen, metas = condition.detached(), metas_of(*xs)
    needs = [x.node is not None for x in xs]

    def backward(gradient: SymbolicTensor) -> Gradients:
        zero = r.empty((), size)
        made = [computed(r, shape, size, chosen, gradient) if n else None for n in needs]
        del zero
        return as_inputs(r, made, metas)

    numbers = [r.empty((), size) for _ in range(2 - len(xs))]
    y = r.made(computed(r, shape, size, condition, *xs), backward, *xs)
    del numbers
    return [y]


def masked_fill(c: NodeCall) -> list[SymbolicTensor]:
    """A tensor with a number where a mask says."""
    r, (x, mask, *_) = c.r, c.inputs
    y = computed(r, c.shapes[0], c.sizes[0], x, mask)
    return [filled(r, x, mask, y)]


def filled(
    r: SymbolicRank, x: SymbolicTensor, mask: SymbolicTensor, y: SymbolicTensor
) -> SymbolicTensor:
    """The node of `masked_fill`, whose result `y` is."""
    kept, metas = mask.detached(), metas_of(x)

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = computed(r, gradient.shape, gradient.element_bytes, gradient, kept)
        return as_inputs(r, [made], metas)

    return r.made(y, backward, x)


def pow_(c: NodeCall) -> list[SymbolicTensor]:
    """A power with a number as exponent, or of a number."""
    if isinstance(c.node.args[0], int | float):
        return Unary("output", 1)(c)
    if len(c.inputs) == 1:
        return Unary("" if c.node.args[1] in (0, 1) else "input", 2)(c)
    return c.refused("with a tensor as exponent")


def larger(c: NodeCall) -> list[SymbolicTensor]:
    """The larger or the lesser of two: equal entries share the gradient."""
    r, (x, y), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    saved, metas = (x.detached(), y.detached()), metas_of(x, y)
    needs = x.node is not None, y.node is not None

    def share(gradient: SymbolicTensor) -> SymbolicTensor:
        beside = computed(r, shape, size, gradient), computed(r, shape, 1, *saved)
        made = computed(r, shape, size, beside[1], beside[0], gradient)
        where_less = computed(r, shape, 1, *saved)
        del beside, where_less
        return made

    def backward(gradient: SymbolicTensor) -> Gradients:
        return as_inputs(r, [share(gradient) if need else None for need in needs], metas)

    return [r.made(computed(r, shape, size, x, y), backward, x, y)]


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
    **dict.fromkeys(("maximum", "minimum"), larger),
    **dict.fromkeys(COMPARISONS, without_gradient),
}
"""Operator of several tensors, or without a gradient -> what it does on shapes."""
