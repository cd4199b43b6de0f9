"""The steps of a redistribution on shapes: what each allocates, as
`parallel/operators/redistribution_collectives.py` does, and the call that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.plan.operators.least_redistribution import RedistributionStep
from workbench.plan.operators.tensor_layout import TensorLayout

Shape = tuple[int, ...]


def redistributed(
    r: SymbolicRank, x: SymbolicTensor, held: TensorLayout, wanted: TensorLayout
) -> SymbolicTensor:
    """A rank's part of a tensor in another layout, without a gradient; `x` itself where nothing is
    to do.
    """
    result = replace(x, node=None)
    size = x.bytes * math.prod(held.num_parts(r.sides))
    dtype = r.w.dtype if x.element_bytes == r.w.element_bytes else "fp32"
    steps = r.least.steps(held, wanted, size)
    for step in steps:
        if step.kind != "slice":
            r.call(step.kind, step.axes, dtype, step.bytes)
        result = _STEPS[step.kind](r, result, step)
    if steps and steps[-1].kind == "slice":  # lest it keep the memory that it is a view of
        result = r.like(result)
    return result


def _shape_after(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> Shape:
    before, after = (layout.num_parts(r.sides) for layout in (step.source, step.target))
    return tuple(n * a // b for n, a, b in zip(x.shape, before, after))


def _slice(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    shape = _shape_after(r, x, step)
    kept = x.is_contiguous and _lies_in_one_piece(x.shape, shape)
    return replace(x, shape=shape, is_contiguous=kept)


def _lies_in_one_piece(whole: Shape, part: Shape) -> bool:
    """Whether a part of a contiguous tensor is: no dim but the first longer than 1 is sharded."""
    cut = [dim for dim, (length, own) in enumerate(zip(whole, part)) if own != length]
    return all(length == 1 for length in whole[: max(cut, default=0)])


def _contiguous(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    return x if x.is_contiguous else r.like(x)


def _all_reduce(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    return r.like(x)


def _all_gather(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    shape = _shape_after(r, x, step)
    gathered = r.empty(shape, x.element_bytes)
    source = _contiguous(r, x)
    del source
    order, can_be_view = _joined_parts(r, x.shape, step)
    if not can_be_view:
        return r.like(gathered)
    return replace(gathered, is_contiguous=order == sorted(order))


def _joined_parts(
    r: SymbolicRank, shape: Shape, step: RedistributionStep
) -> tuple[list[int], bool]:
    """(order in memory of the dims of the gathered tensor, but for those of size 1; whether each is
    a view of the ranks' parts, which lie one behind the other).
    """
    sizes = [*(r.sides[axis] for axis in step.axes), *shape]
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    order: list[int] = []
    is_view = True
    for dim, (before, after) in enumerate(zip(step.source.dims, step.target.dims)):
        joined = [step.axes.index(axis) for axis in before[len(after) :]]
        joined = [at for at in (*joined, len(step.axes) + dim) if sizes[at] > 1]
        is_view &= all(strides[a] == strides[b] * sizes[b] for a, b in pairwise(joined))
        order += joined
    return order, is_view


def _reduce_scatter(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    source = r.like(x)
    shard = r.empty(_shape_after(r, x, step), x.element_bytes)
    del source
    return shard


def _all_to_all(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    shape = _shape_after(r, x, step)
    result = r.empty(shape, x.element_bytes)
    pieces = None if _is_sent_whole(x, step) else r.like(x)
    packed, unpacked = r.like(x), r.like(result)
    del pieces, packed, unpacked
    return result


def _is_sent_whole(x: SymbolicTensor, step: RedistributionStep) -> bool:
    """Whether the pieces for the other ranks lie in memory one behind the other."""
    cut = [
        dim
        for dim, (before, after) in enumerate(zip(step.source.dims, step.target.dims))
        if len(after) > len(before)
    ]
    return x.is_contiguous and all(n == 1 for n in x.shape[: min(cut, default=0)])


_STEPS: dict[str, Callable[[SymbolicRank, SymbolicTensor, RedistributionStep], SymbolicTensor]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
