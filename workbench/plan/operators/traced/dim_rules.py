"""The table of operators: which dims of an operator's tensors are one dimension, and which of them
cannot be sharded.

One entry an operator; one test an entry. An operator that is not here runs on replicated inputs.
Dimensions are those of GSPMD (Xu et al. 2021, arXiv 2105.04663) and of Shardy's factors.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.plan.operators.traced.moving_rules import MOVING
from workbench.plan.operators.traced.node_dims import (
    NodeDims,
    RuleInputs,
    aligned,
    named,
    replicated,
)
from workbench.plan.operators.traced.product_rules import (
    addmm_dims,
    attention_dims,
    conv_dims,
    einsum_dims,
    embedding_dims,
    linear_dims,
    loss_dims,
    matmul_dims,
    norm_dims,
    own_loss_dims,
)

Rule = Callable[[RuleInputs], NodeDims]


def _elementwise(x: RuleInputs) -> NodeDims:
    """Every element by itself; tensors broadcast."""
    ndim = len(x.outputs[0])
    dims = tuple(aligned(shape, ndim) for shape in x.shapes)
    return NodeDims(dims, tuple(aligned(shape, ndim) for shape in x.outputs))


def _along(index: int, default: int = -1) -> Rule:
    """Element by element but along one dim, argument `index`; results may lack it, or have it with
    another size.
    """

    def rule(x: RuleInputs) -> NodeDims:
        of_all = any(len(output) < len(x.shapes[0]) - 1 for output in x.outputs)
        if of_all or x.argument(index, "dim", default) is None or not x.shapes[0]:
            return replicated(x)
        shape, at = x.shapes[0], x.dim(index, default=default)
        dims = aligned(shape, len(shape))
        outputs = []
        for output in x.outputs:
            if len(output) < len(shape):
                outputs.append((*dims[:at], *dims[at + 1 :]))
            elif output[at] == shape[at]:
                outputs.append(dims)
            else:
                result = named(output[at : at + 1], "result")
                outputs.append((*dims[:at], *result, *dims[at + 1 :]))
        return NodeDims((dims,), tuple(outputs), frozenset({f"dim{at}", "result"}))

    return rule


def _reduction(summed: bool) -> Rule:
    """Over some dims or all; those of a sum may be sharded."""

    def rule(x: RuleInputs) -> NodeDims:
        shape, over = x.shapes[0], x.argument(1, "dim")
        over = over if isinstance(over, tuple) else range(len(shape)) if over is None else (over,)
        at = {each % max(1, len(shape)) for each in over} or set(range(len(shape)))
        dims = aligned(shape, len(shape))
        keep = len(x.outputs[0]) == len(shape)
        output = tuple(() if i in at else dim for i, dim in enumerate(dims) if keep or i not in at)
        return NodeDims((dims,), (output,), frozenset(() if summed else (f"dim{i}" for i in at)))

    return rule


def _one_hot(x: RuleInputs) -> NodeDims:
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    output = (*dims, *named(x.outputs[0][-1:], "classes"))
    return NodeDims((dims,), (output,), frozenset({"classes"}))


def _triangle(x: RuleInputs) -> NodeDims:
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    last = (f"dim{len(dims) - 2}", f"dim{len(dims) - 1}")
    return NodeDims((dims,), (dims,), frozenset(last))


def _extreme(x: RuleInputs) -> NodeDims:
    """Of two tensors, or along a dim; else of all entries."""
    rule = {"other": _elementwise, "dim": _along(1)}.get(x.node.overload, replicated)
    return rule(x)


ELEMENTWISE = (
    "add",
    "sub",
    "mul",
    "div",
    "rsub",
    "pow",
    "neg",
    "abs",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "square",
    "sin",
    "cos",
    "erf",
    "sign",
    "floor",
    "tanh",
    "sigmoid",
    "relu",
    "gelu",
    "silu",
    "mish",
    "elu",
    "leaky_relu",
    "hardtanh",
    "softplus",
    "log_sigmoid",
    "selu",
    "celu",
    "hardswish",
    "hardsigmoid",
    "relu6",
    "log1p",
    "expm1",
    "exp2",
    "logit",
    "clamp",
    "clamp_min",
    "clamp_max",
    "where",
    "masked_fill",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_not",
    "bitwise_xor",
    "__and__",
    "__or__",
    "__xor__",
    "remainder",
    "fmod",
    "floor_divide",
    "round",
    "isnan",
    "isinf",
    "nan_to_num",
    "dropout",
    "lerp",
    "addcmul",
    "addcdiv",
    "trunc",
    "ceil",
    "true_divide",
    "detach",
)
COMPUTING: dict[str, Rule] = {
    "linear": linear_dims,
    "addmm": addmm_dims,
    "matmul": matmul_dims,
    "bmm": matmul_dims,
    "mm": matmul_dims,
    "einsum": einsum_dims,
    "conv1d": conv_dims,
    "embedding": embedding_dims,
    "layer_norm": norm_dims,
    "rms_norm": norm_dims,
    "scaled_dot_product_attention": attention_dims,
    "softmax": _along(1),
    "log_softmax": _along(1),
    "_softmax": _along(1),
    "_log_softmax": _along(1),
    "cumsum": _along(1),
    "cumprod": _along(1),
    "argmax": _along(1),
    "argmin": _along(1),
    "topk": _along(2),
    "sort": _along(1),
    "argsort": _along(1),
    "max": _extreme,
    "min": _extreme,
    "logsumexp": _reduction(summed=False),
    "sum": _reduction(summed=True),
    "mean": _reduction(summed=False),
    "amax": _reduction(summed=False),
    "amin": _reduction(summed=False),
    "var": _reduction(summed=False),
    "one_hot": _one_hot,
    "triu": _triangle,
    "tril": _triangle,
    "head_loss": loss_dims,
    "cross_entropy_loss": own_loss_dims,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
}
"""Operator -> rule."""


def dims_of(x: RuleInputs) -> NodeDims:
    """Dimensions of an operator, by its rule; none can be sharded where it has no rule."""
    return (COMPUTING | MOVING).get(x.node.op, replicated)(x)


def has_rule(op: str) -> bool:
    """Whether the table has an entry."""
    return op in COMPUTING or op in MOVING


def moves_data_only(op: str) -> bool:
    """Whether an operator only moves, copies or makes data: strategies do not name it."""
    return op in MOVING
