"""Rules of operators that only move data: reshapes, transposes, slices, copies, and constants."""

from __future__ import annotations

import math
from collections.abc import Callable

from workbench.plan.operators.traced.node_dims import (
    Dim,
    Dims,
    NodeDims,
    RuleInputs,
    aligned,
    named,
)

PART = "part"
"""Label of the parts that a tensor is split into or joined from: never sharded."""


def _reshape(x: RuleInputs) -> NodeDims:
    """Dims whose products are equal, from the left, are one dimension of several factors."""
    shapes = x.shapes[0], x.outputs[0]
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(shapes[0]), [()] * len(shapes[1]))
    left, right = ([i for i, size in enumerate(shape) if size > 1] for shape in shapes)
    group = 0
    while left and right:
        taken = [[left.pop(0)], [right.pop(0)]]
        while (sizes := [math.prod(s[i] for i in t) for s, t in zip(shapes, taken)])[0] != sizes[1]:
            smaller = sizes[0] > sizes[1]
            taken[smaller].append((left, right)[smaller].pop(0))
        for side in (0, 1):
            for at in taken[side]:
                dims[side][at] = ((f"dim{group}", shapes[side][at]),)
        group += 1
    return NodeDims((tuple(dims[0]),), (tuple(dims[1]),))


def _permuted(order: Callable[[RuleInputs], list[int]]) -> Callable[[RuleInputs], NodeDims]:
    def rule(x: RuleInputs) -> NodeDims:
        dims = aligned(x.shapes[0], len(x.shapes[0]))
        return NodeDims((dims,), (tuple(dims[at] for at in order(x)),))

    return rule


def _swapped(x: RuleInputs) -> list[int]:
    order = list(range(len(x.shapes[0])))
    a, b = x.dim(1, "dim0"), x.dim(2, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def _dims_argument(x: RuleInputs) -> list[int]:
    dims = x.node.args[1]
    return [each % len(x.shapes[0]) for each in dims]


def _reversed(x: RuleInputs) -> list[int]:
    return list(reversed(range(len(x.shapes[0]))))


def _last_swapped(x: RuleInputs) -> list[int]:
    *order, a, b = range(len(x.shapes[0]))
    return [*order, b, a]


def _as_complex(x: RuleInputs) -> NodeDims:
    """The last dim, of two, is gone."""
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    return NodeDims((dims,), (dims[:-1],), frozenset({f"dim{len(dims) - 1}"}))


def _as_real(x: RuleInputs) -> NodeDims:
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    return NodeDims((dims,), ((*dims, ((PART, 2),)),), frozenset({PART}))


def _pad(x: RuleInputs) -> NodeDims:
    """Dims that are padded cannot be sharded; the amounts are from the last dim on, two each."""
    shape, output, amounts = x.shapes[0], x.outputs[0], x.argument(1, "pad")
    assert isinstance(amounts, tuple)
    read, written = list(aligned(shape, len(shape))), list(aligned(output, len(output)))
    fixed = set()
    for dim in {len(shape) - 1 - at // 2 for at, amount in enumerate(amounts) if amount}:
        (written[dim],) = named(output[dim : dim + 1], f"padded{dim}")
        fixed |= {f"dim{dim}", f"padded{dim}"}
    return NodeDims((tuple(read),), (tuple(written),), frozenset(fixed))


def _expand(x: RuleInputs) -> NodeDims:
    ndim = len(x.outputs[0])
    return NodeDims((aligned(x.shapes[0], ndim),), (aligned(x.outputs[0], ndim),))


def _copy(x: RuleInputs) -> NodeDims:
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    others = tuple(named(s, (f"o{i}" for i in range(len(s)))) for s in x.shapes[1:])
    labels = frozenset(label for each in others for dim in each for label, _ in dim)
    return NodeDims((dims, *others), (dims,), labels)


def _constant(x: RuleInputs) -> NodeDims:
    outputs = tuple(aligned(shape, len(shape)) for shape in x.outputs)
    fixed = frozenset(label for each in outputs for dim in each for label, _ in dim)
    return NodeDims((), outputs, fixed)


def _select(x: RuleInputs) -> NodeDims:
    at = x.dim(1)
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    return NodeDims((dims,), ((*dims[:at], *dims[at + 1 :]),), frozenset({f"dim{at}"}))


def _unbind(x: RuleInputs) -> NodeDims:
    at = x.dim(1)
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    output = (*dims[:at], *dims[at + 1 :])
    return NodeDims((dims,), (output,) * len(x.outputs), frozenset({f"dim{at}"}))


def _in_parts(shape: tuple[int, ...], at: int, size: int) -> tuple[Dims, Dims]:
    """A tensor whose dim `at` is parts of a `size`, and one of these parts."""
    dims = list(aligned(shape, len(shape)))
    each = dims.copy()
    inner = (("kept", size),) if size > 1 else ()
    count = shape[at] // size
    dims[at] = (*(((PART, count),) if count > 1 else ()), *inner)
    each[at] = inner
    return tuple(dims), tuple(each)


def _part_only(x: RuleInputs, at: int) -> NodeDims:
    """The dim `at` cannot be sharded, the others can."""
    shape = x.shapes[0]
    read = aligned(shape, len(shape))
    outputs = tuple(
        (*read[:at], *named(output[at : at + 1], "kept"), *read[at + 1 :]) for output in x.outputs
    )
    return NodeDims((read,), outputs, frozenset({f"dim{at}", "kept"}))


def _slice(x: RuleInputs) -> NodeDims:
    """A part of one dim: where that is one of several equal parts, the part may be sharded."""
    at, size = x.dim(1), x.shapes[0][x.dim(1)]
    start = x.argument(2, "start", 0) or 0
    assert isinstance(start, int)
    start, length = (start + size if start < 0 else start), x.outputs[0][at]
    plain = x.argument(4, "step", 1) == 1 and length and size % length == start % length == 0
    if not plain:
        return _part_only(x, at)
    read, kept = _in_parts(x.shapes[0], at, length)
    return NodeDims((read,), (kept,), frozenset({PART}))


def _split(dim: int) -> Callable[[RuleInputs], NodeDims]:
    def rule(x: RuleInputs) -> NodeDims:
        at = x.dim(dim)
        sizes = {output[at] for output in x.outputs}
        if len(sizes) > 1:
            return _part_only(x, at)
        read, kept = _in_parts(x.shapes[0], at, sizes.pop())
        return NodeDims((read,), (kept,) * len(x.outputs), frozenset({PART}))

    return rule


def _cat(x: RuleInputs) -> NodeDims:
    shape, output = x.shapes[0], x.outputs[0]
    value = x.argument(1, "dim", 0)
    assert isinstance(value, int)
    at = value % len(output)
    if len({each[at] for each in x.shapes}) > 1 or any(len(s) != len(shape) for s in x.shapes):
        ndim = len(output)
        read = tuple(
            (
                *aligned(s, ndim)[:at],
                *named(s[at : at + 1], f"piece{i}"),
                *aligned(s, ndim)[at + 1 :],
            )
            for i, s in enumerate(x.shapes)
        )
        fixed = {f"dim{at}", *(f"piece{i}" for i in range(len(read)))}
        return NodeDims(read, (aligned(output, ndim),), frozenset(fixed))
    whole, each = _in_parts(output, at, shape[at])
    return NodeDims((each,) * len(x.shapes), (whole,), frozenset({PART}))


def _stack(x: RuleInputs) -> NodeDims:
    value = x.argument(1, "dim", 0)
    assert isinstance(value, int)
    at = value % len(x.outputs[0])
    dims = aligned(x.shapes[0], len(x.shapes[0]))
    output = (*dims[:at], *named((len(x.shapes),), PART), *dims[at:])
    return NodeDims((dims,) * len(x.shapes), (output,), frozenset({PART}))


MOVING: dict[str, Callable[[RuleInputs], NodeDims]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
        _reshape,
    ),
    "transpose": _permuted(_swapped),
    "permute": _permuted(_dims_argument),
    **dict.fromkeys(("t", "numpy_T"), _permuted(_reversed)),
    "mT": _permuted(_last_swapped),
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
    "pad": _pad,
    "expand": _expand,
    **dict.fromkeys(
        (
            "contiguous",
            "clone",
            "to",
            "_to_copy",
            "alias",
            "lift_fresh_copy",
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "type_as",
        ),
        _copy,
    ),
    **dict.fromkeys(
        ("full", "zeros", "ones", "arange", "empty", "scalar_tensor", "eye", "linspace"), _constant
    ),
    "select": _select,
    "unbind": _unbind,
    "slice": _slice,
    "split": _split(2),
    "split_with_sizes": _split(2),
    "chunk": _split(2),
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
}
"""Operator -> rule."""
