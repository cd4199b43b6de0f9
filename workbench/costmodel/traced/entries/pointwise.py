"""Operators of one tensor that compute element by element, on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import computed

Entry = Callable[[NodeCall], Sequence[SymbolicTensor]]


@dataclass(frozen=True)
class Unary:
    """An operator of one tensor.

    Attributes:
        saves: Whether backward reads its input or its output, or neither.
        temporaries: Tensors of its size that backward computes beside the gradient.
        masks: Tensors of truth values that it computes, and a number.
    """

    saves: str = ""
    temporaries: int = 0
    masks: int = 0

    def __call__(self, c: NodeCall) -> list[SymbolicTensor]:
        """One new tensor."""
        return [unary(c.r, c.inputs[0], self, c.sizes[0])]


def unary(
    r: SymbolicRank, x: SymbolicTensor, kind: Unary, element_bytes: int = 0
) -> SymbolicTensor:
    """The result of an operator of one tensor."""
    y = computed(r, x.shape, element_bytes or x.element_bytes, x)
    saved = {"input": x.detached(), "output": y, "": None}[kind.saves]
    shape, size = x.shape, x.element_bytes
    beside_bytes = [size] * kind.temporaries + [1] * kind.masks

    def backward(gradient: SymbolicTensor) -> Gradients:
        read = () if saved is None else (saved,)
        number = r.empty((), size * bool(kind.masks))
        beside = [computed(r, shape, each, *(read or (gradient,))) for each in beside_bytes]
        made = computed(r, shape, size, gradient, *read)
        del beside, number
        return (made,)

    return r.made(y, backward, x)


def clamp(c: NodeCall) -> list[SymbolicTensor]:
    """Backward masks what lies outside of the bounds, which are numbers."""
    if len(c.inputs) > 1:
        c.refused("with tensors as bounds")
    bounds = [c.argument(1, "min"), c.argument(2, "max")]
    masks = 2 if c.node.op == "clamp" and None not in bounds else 1
    return Unary("input", masks=masks)(c)


def log_sigmoid(c: NodeCall) -> list[SymbolicTensor]:
    """Logarithm of the sigmoid: a CPU keeps its exponential beside the input."""
    r, (x,) = c.r, c.inputs
    y, saved = computed(r, x.shape, x.element_bytes, x), x.detached()
    on_cpu = r.w.fixed.gpu.device == "cpu"
    exponential = computed(r, x.shape, x.element_bytes, x) if on_cpu else None

    def backward(gradient: SymbolicTensor) -> Gradients:
        read = (gradient, saved) if exponential is None else (gradient, saved, exponential)
        return (computed(r, saved.shape, saved.element_bytes, *read),)

    return [r.made(y, backward, x)]


def nan_to_num(c: NodeCall) -> list[SymbolicTensor]:
    """Finite numbers: backward looks for them again by magnitude."""
    r, (x,) = c.r, c.inputs
    y, saved, size = computed(r, x.shape, x.element_bytes, x), x.detached(), x.element_bytes

    def backward(gradient: SymbolicTensor) -> Gradients:
        beside = [computed(r, saved.shape, each, saved) for each in (size, 1, 1)]
        finite = computed(r, saved.shape, 1, saved)
        del beside
        return (computed(r, saved.shape, size, gradient, finite),)

    return [r.made(y, backward, x)]


POINTWISE: dict[str, Entry] = {
    **dict.fromkeys(("neg", "floor", "ceil", "round", "trunc", "sign"), Unary()),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "exp"), Unary("output")),
    **dict.fromkeys(("sqrt", "expm1", "exp2"), Unary("output", 1)),
    **dict.fromkeys(("rsqrt", "reciprocal"), Unary("output", 2)),
    **dict.fromkeys(
        (
            *("gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "relu6"),
            *("softplus", "hardswish", "hardsigmoid", "log", "logit"),
        ),
        Unary("input"),
    ),
    **dict.fromkeys(("sin", "abs", "log1p"), Unary("input", 1)),
    **dict.fromkeys(("cos", "square"), Unary("input", 2)),
    "erf": Unary("input", 4),
    "log_sigmoid": log_sigmoid,
    "nan_to_num": nan_to_num,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), clamp),
}
"""Operator -> what it does on shapes."""
