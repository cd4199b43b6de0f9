"""Rules of products, norms, attention and the loss."""

from __future__ import annotations

from workbench.plan.operators.traced.node_dims import (
    Dim,
    Dims,
    NodeDims,
    RuleInputs,
    named,
    replicated,
)


def linear_dims(x: RuleInputs) -> NodeDims:
    rows = "rows " * (len(x.shapes[0]) - 1)
    weight = named(x.shapes[1], "columns inner")
    bias = tuple(named(shape, "columns") for shape in x.shapes[2:])
    return NodeDims(
        (named(x.shapes[0], rows + "inner"), weight, *bias),
        (named(x.outputs[0], rows + "columns"),),
        added=frozenset({2}),
    )


def addmm_dims(x: RuleInputs) -> NodeDims:
    """Bias first."""
    if x.node.kwargs:  # scaled terms
        return replicated(x)
    bias = named(x.shapes[0], "rows columns" if len(x.shapes[0]) == 2 else "columns")
    inputs = bias, named(x.shapes[1], "rows inner"), named(x.shapes[2], "inner columns")
    return NodeDims(inputs, (named(x.outputs[0], "rows columns"),), added=frozenset({0}))


def matmul_dims(x: RuleInputs) -> NodeDims:
    left, right = x.shapes
    if len(right) == 2 and len(left) >= 2:
        rows = "rows " * (len(left) - 1)
        inputs = named(left, rows + "inner"), named(right, "inner columns")
        return NodeDims(inputs, (named(x.outputs[0], rows + "columns"),))
    if min(len(left), len(right)) < 2:
        return replicated(x)
    batch = [f"dim{i}" for i in range(len(x.outputs[0]) - 2)]

    def dims(shape: tuple[int, ...], row: str, column: str) -> Dims:
        return named(shape, [*batch[len(batch) - (len(shape) - 2) :], row, column])

    inputs = dims(left, "left", "inner"), dims(right, "inner", "right")
    return NodeDims(inputs, (dims(x.outputs[0], "left", "right"),))


def einsum_dims(x: RuleInputs) -> NodeDims:
    equation = x.node.args[0].replace(" ", "")
    if "." in equation or "->" not in equation:
        return replicated(x)
    inputs, _, output = equation.partition("->")
    parts = inputs.split(",")
    if any(len(set(part)) < len(part) for part in parts):
        return replicated(x)  # a diagonal
    read = tuple(named(shape, list(part)) for shape, part in zip(x.shapes, parts))
    return NodeDims(read, (named(x.outputs[0], list(output)),))


def conv_dims(x: RuleInputs) -> NodeDims:
    """Input [.., channels, length], weight [channels, channels of a group, kernel], bias.

    Channels of several groups are sharded by groups: a group is one dimension with its own weights.
    """
    shape, (columns, inner, _) = x.shapes[0], x.shapes[1]
    groups = shape[-2] // inner

    def grouped(label: str, size: int) -> Dim:
        return tuple(each for each in (("groups", groups), (label, size)) if each[1] > 1)

    out = grouped("columns", columns // groups)
    weight = (out, *named(x.shapes[1][1:], "inner kernel"))
    rows, length = named(shape[:-2], "rows"[: 4 * (len(shape) > 2)]), x.outputs[0][-1:]
    return NodeDims(
        ((*rows, grouped("inner", inner), *named(shape[-1:], "length")), weight)
        + ((out,),) * (len(x.shapes) - 2),
        ((*rows, out, *named(length, "positions")),),
        frozenset({"inner", "kernel", "length", "positions"}),
    )


def embedding_dims(x: RuleInputs) -> NodeDims:
    rows = "rows " * len(x.shapes[1])
    inputs = named(x.shapes[0], "vocabulary hidden"), named(x.shapes[1], rows)
    # `padding_idx` is an index into the whole table.
    padded = x.argument(2, "padding_idx", -1) != -1
    fixed = frozenset({"vocabulary"} if padded else ())
    return NodeDims(inputs, (named(x.outputs[0], rows + "hidden"),), fixed)


def norm_dims(x: RuleInputs) -> NodeDims:
    """Over the last dims: the argument behind the input."""
    shape, last = x.shapes[0], len(x.node.args[1])
    rows = ["rows"] * (len(shape) - last)
    dims = named(shape, rows + ["hidden"] * last)
    affine = tuple(named(each, ["hidden"] * last) for each in x.shapes[1:])
    return NodeDims((dims, *affine), (dims,), frozenset({"hidden"}))


def attention_dims(x: RuleInputs) -> NodeDims:
    """Query [.., heads, query, depth], key and value [.., heads, key, depth]; key-value heads may
    be fewer.
    """
    q, k, v, *mask = x.shapes
    if len(q) != 4 or len(v) != 4 or len(k) != 4:
        return replicated(x)
    causal = bool(x.argument(5, "is_causal", False))
    groups = q[1] // k[1]
    heads = tuple(d for d in (("heads", k[1]), ("group", groups)) if d[1] > 1)
    queries = (*named(q[:1], "rows"), heads)
    keys = named(k[:2], "rows heads")
    read = [
        (*queries, *named(q[2:], "query depth")),
        (*keys, *named(k[2:], "key depth")),
        (*keys, *named(v[2:], "key value")),
    ]
    for shape in mask:
        whole = ["rows", "heads", "query", "key"][4 - len(shape) :]
        dims = list(named(shape, whole))
        if len(shape) == 4 and shape[1] > 1:
            dims[1] = heads
        read.append(tuple(dims))
    fixed = {"key", "depth", "value", "group"} | ({"query"} if causal else set())
    output = (*queries, *named((q[2], v[3]), "query value"))
    return NodeDims(tuple(read), (output,), frozenset(fixed))


def loss_dims(x: RuleInputs) -> NodeDims:
    """Logits [.., vocabulary] and targets [..] to their sum."""
    rows = "rows " * len(x.shapes[1])
    return NodeDims((named(x.shapes[0], rows + "vocabulary"), named(x.shapes[1], rows)), ((),))


def own_loss_dims(x: RuleInputs) -> NodeDims:
    """A module's own `cross_entropy`, if it sums."""
    if x.argument(3, "reduction", 1) != 2 or len(x.shapes) != 2:
        return replicated(x)
    dims = loss_dims(x)
    return NodeDims(dims.inputs, dims.outputs, frozenset({"vocabulary"}))
