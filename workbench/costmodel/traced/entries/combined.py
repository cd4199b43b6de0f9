"""Operators that combine two or three tensors in one kernel, on shapes."""

from __future__ import annotations

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.traced.entries.pointwise import Entry
from workbench.costmodel.traced.entries.products import broadcast
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import as_inputs, computed, metas_of


def _saved(*xs: SymbolicTensor, where: bool) -> list[SymbolicTensor]:
    """What backward reads, if it does."""
    return [x.detached() for x in xs] if where else []


def addcmul(c: NodeCall) -> list[SymbolicTensor]:
    """x + value a b: each factor is scaled for the other's gradient."""
    r, (x, a, b), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas, needs = metas_of(x, a, b), [t.node is not None for t in (x, a, b)]
    saved = [_saved(b, where=needs[1]), _saved(a, where=needs[2])]

    def backward(gradient: SymbolicTensor) -> Gradients:
        made: list[SymbolicTensor | None] = [gradient if needs[0] else None]
        for other in saved:
            scaled = [computed(r, t.shape, size, t) for t in other]
            made.append(computed(r, shape, size, gradient, *scaled) if scaled else None)
            del scaled
        return as_inputs(r, made, metas)

    return [r.made(computed(r, shape, size, x, a, b), backward, x, a, b)]


def addcdiv(c: NodeCall) -> list[SymbolicTensor]:
    """x + value a / b: b's gradient is -gradient (value a / b^2)."""
    r, (x, a, b), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas, needs = metas_of(x, a, b), [t.node is not None for t in (x, a, b)]
    divisor, divided = _saved(b, where=needs[1] or needs[2]), _saved(a, where=needs[2])

    def of_divided(gradient: SymbolicTensor) -> SymbolicTensor:
        scaled = [computed(r, t.shape, size, t) for t in divisor]
        return computed(r, shape, size, gradient, *scaled)

    def of_divisor(gradient: SymbolicTensor) -> SymbolicTensor:
        beside = [computed(r, t.shape, size, t) for t in (*divided, *divisor)]
        quotient = broadcast(*(t.shape for t in beside))
        beside.append(computed(r, quotient, size, *beside))
        beside.append(computed(r, gradient.shape, size, gradient))
        return computed(r, shape, size, *beside)

    def backward(gradient: SymbolicTensor) -> Gradients:
        made = [
            gradient if needs[0] else None,
            of_divided(gradient) if needs[1] else None,
            of_divisor(gradient) if needs[2] else None,
        ]
        return as_inputs(r, made, metas)

    return [r.made(computed(r, shape, size, x, a, b), backward, x, a, b)]


def lerp(c: NodeCall) -> list[SymbolicTensor]:
    """x + weight (end - x), where the weight is a number or a tensor."""
    r, (x, end, *weight), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas, needs = metas_of(*c.inputs), [t.node is not None for t in c.inputs]
    by = _saved(*weight, where=needs[0] or needs[1])
    between = _saved(end, x, where=any(needs[2:]))

    def backward(gradient: SymbolicTensor) -> Gradients:
        def scaled(*of: SymbolicTensor) -> SymbolicTensor:
            return computed(r, shape, size, gradient, *of)

        of_end = scaled(*by) if needs[1] else None
        rest = [computed(r, t.shape, size, t) for t in by if needs[0]]
        of_x = scaled(*rest) if needs[0] else None
        del rest
        difference = [computed(r, shape, size, *between)] if between else []
        of_weight = [scaled(*difference) if difference else None for _ in weight]
        del difference
        return as_inputs(r, [of_x, of_end, *of_weight], metas)

    return [r.made(computed(r, shape, size, *c.inputs), backward, *c.inputs)]


def modulo(c: NodeCall) -> list[SymbolicTensor]:
    """Remainder of a division: the gradient of the divisor is -gradient times the quotient."""
    if c.divides_number:
        c.refused("of a number")
    r, (_, *divisor), shape, size = c.r, c.inputs, c.shapes[0], c.sizes[0]
    metas, needs = metas_of(*c.inputs), [t.node is not None for t in c.inputs]
    saved = _saved(*c.inputs, where=any(needs[1:]))

    def of_divisor(gradient: SymbolicTensor) -> SymbolicTensor:
        quotient = computed(r, shape, size, *saved)
        negated = computed(r, shape, size, gradient)
        return computed(r, shape, size, negated, quotient)

    def backward(gradient: SymbolicTensor) -> Gradients:
        own = [gradient if needs[0] else None]
        made = [*own, *(of_divisor(gradient) if saved else None for _ in divisor)]
        return as_inputs(r, made, metas)

    return [r.made(computed(r, shape, size, *c.inputs), backward, *c.inputs)]


COMBINED: dict[str, Entry] = {
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "lerp": lerp,
    **dict.fromkeys(("fmod", "remainder"), modulo),
}
"""Operator -> what it does on shapes."""
