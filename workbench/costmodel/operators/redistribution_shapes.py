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
from workbench.runtime_facts.tensor_strides import contiguous_strides, strides_of

Shape = tuple[int, ...]


def redistributed(
    r: SymbolicRank,
    x: SymbolicTensor,
    held: TensorLayout,
    wanted: TensorLayout,
    dtype: str | None = None,
) -> SymbolicTensor:
    """A rank's part of a tensor in another layout, without a gradient; `x` itself where nothing is
    to do. Without a `dtype` it is the plan's, or fp32 where it is wider.
    """
    result = replace(x, node=None)
    size = x.bytes * math.prod(held.num_parts(r.sides))
    dtype = dtype or (r.w.dtype if x.element_bytes == r.w.element_bytes else "fp32")
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
    return replace(x, shape=_shape_after(r, x, step), strides=strides_of(x.shape, x.strides))


def _contiguous(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    return x if x.is_contiguous else r.like(x)


def _all_reduce(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    return r.like(x)


def _all_gather(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    shape = _shape_after(r, x, step)
    gathered = r.empty(shape, x.element_bytes)
    source = _contiguous(r, x)
    del source
    strides = _joined_strides(r, x.shape, step)
    return r.like(gathered) if strides is None else replace(gathered, strides=strides)


def _joined_strides(r: SymbolicRank, shape: Shape, step: RedistributionStep) -> Shape | None:
    """Strides of the gathered tensor as a view of the ranks' parts, which lie one behind the other;
    None where it must be copied.
    """
    sizes = (*(r.sides[axis] for axis in step.axes), *shape)
    strides, found = contiguous_strides(sizes), []
    for dim, (before, after) in enumerate(zip(step.source.dims, step.target.dims)):
        joined = [step.axes.index(axis) for axis in before[len(after) :]]
        joined = [at for at in (*joined, len(step.axes) + dim) if sizes[at] > 1]
        if any(strides[a] != strides[b] * sizes[b] for a, b in pairwise(joined)):
            return None
        found.append(strides[joined[-1]] if joined else 1)
    return tuple(found)


def _reduce_scatter(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    source = r.like(x)
    shard = r.empty(_shape_after(r, x, step), x.element_bytes)
    del source
    return shard


def _all_to_all(r: SymbolicRank, x: SymbolicTensor, step: RedistributionStep) -> SymbolicTensor:
    packed, unpacked = r.like(x), r.like(x)
    del packed
    result = r.empty(_shape_after(r, x, step), x.element_bytes)
    del unpacked
    return result


_STEPS: dict[str, Callable[[SymbolicRank, SymbolicTensor, RedistributionStep], SymbolicTensor]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
