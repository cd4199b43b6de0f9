"""The steps of a redistribution on a rank's part of a tensor: a slice, or one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import (
    all_gather_async,
    reduce_scatter_async,
    run_collective,
)
from workbench.parallel.mesh import MeshAxis
from workbench.plan.operators.least_redistribution import RedistributionStep
from workbench.plan.operators.tensor_layout import Dims

Box = tuple[tuple[int, int], ...]
"""[start, stop) along each dim."""


class GridGroups:
    """Process groups of a grid of ranks, one for each run of neighboring axes.

    Args:
        axes: By run; each has the sizes of its axes, and its ranks in the grid's order.
        sizes: Of the grid's axes, outermost first.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], MeshAxis], sizes: tuple[int, ...]) -> None:
        self.axes, self.sizes = axes, sizes

    def take(self, x: Tensor, step: RedistributionStep) -> Tensor:
        """`x` after a step; a view of it after a slice, else new memory."""
        return _STEPS[step.kind](self, x, step)

    def _slice(self, x: Tensor, step: RedistributionStep) -> Tensor:
        axis = self.axes[step.axes]
        for dim, added in enumerate(_added(step.source.dims, step.target.dims)):
            if added:
                size = x.shape[dim] // axis.size
                x = x.narrow(dim, axis.index * size, size)
        return x

    def _all_reduce(self, x: Tensor, step: RedistributionStep) -> Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        run_collective(partial(dist.all_reduce, group=self.axes[step.axes].group), summed)
        return summed

    def _all_gather(self, x: Tensor, step: RedistributionStep) -> Tensor:
        axis = self.axes[step.axes]
        gathered = x.new_empty(axis.size, *x.shape)
        all_gather_async(gathered, x.contiguous(), axis)()
        parts = gathered.view(*(self.sizes[a] for a in step.axes), *x.shape)
        removed = _added(step.target.dims, step.source.dims)
        return _joined(parts, step.axes, removed)

    def _reduce_scatter(self, x: Tensor, step: RedistributionStep) -> Tensor:
        axis, added = self.axes[step.axes], _added(step.source.dims, step.target.dims)
        parts = self._split(x, step.axes, added)
        source = parts.clone(memory_format=torch.contiguous_format)  # it is overwritten
        shard = x.new_empty(parts.shape[len(step.axes) :])
        reduce_scatter_async(shard, source, axis)()
        return shard

    def _split(self, x: Tensor, run: Sequence[int], added: Dims) -> Tensor:
        """A view of `x`, the parts of each axis of `run` in front: the opposite of `_joined`."""
        shape: list[int] = []
        at: dict[int, int] = {}
        own: list[int] = []
        for length, axes in zip(x.shape, added):
            for axis in axes:
                at[axis] = len(shape)
                shape.append(self.sizes[axis])
            own.append(len(shape))
            shape.append(length // math.prod(self.sizes[axis] for axis in axes))
        return x.view(shape).permute(*(at[axis] for axis in run), *own)

    def _all_to_all(self, x: Tensor, step: RedistributionStep) -> Tensor:
        axis, dims_of = self.axes[step.axes], (step.source.dims, step.target.dims)
        # The group's axes are the innermost ones, so that of the outer ones it has one part.
        before, after = (
            tuple(tuple(a for a in axes if a in step.axes) for axes in dims) for dims in dims_of
        )
        whole = [n * self._ranks(axes) for n, axes in zip(x.shape, before)]
        every = [
            dict(zip(step.axes, index))
            for index in product(*(range(self.sizes[a]) for a in step.axes))
        ]
        held, wanted = (
            [self._box(whole, dims, index) for index in every] for dims in (before, after)
        )
        mine, own = held[axis.index], wanted[axis.index]
        sent = [_overlap(mine, box) for box in wanted]
        received = [_overlap(box, own) for box in held]
        packed, unpacked = _packed(x, mine, sent), x.new_empty(x.numel())
        run_collective(
            partial(
                dist.all_to_all_single,
                output_split_sizes=list(map(_numel, received)),
                input_split_sizes=list(map(_numel, sent)),
                group=axis.group,
            ),
            unpacked,
            packed,
        )
        del packed
        return _unpacked(unpacked, own, received)

    def _ranks(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def _box(self, whole: Sequence[int], dims: Dims, index: Mapping[int, int]) -> Box:
        """What the rank at an `index` on each axis holds of what the group does."""
        box = []
        for length, axes in zip(whole, dims):
            size, at = length // self._ranks(axes), 0
            for axis in axes:
                at = at * self.sizes[axis] + index[axis]
            box.append((at * size, (at + 1) * size))
        return tuple(box)


_STEPS: dict[str, Callable[[GridGroups, Tensor, RedistributionStep], Tensor]] = {
    "slice": GridGroups._slice,
    "all_gather": GridGroups._all_gather,
    "all_to_all": GridGroups._all_to_all,
    "all_reduce": GridGroups._all_reduce,
    "reduce_scatter": GridGroups._reduce_scatter,
}


def _added(before: Dims, after: Dims) -> Dims:
    """For each dim the axes that shard it afterwards only; they are its innermost."""
    return tuple(axes[len(kept) :] for kept, axes in zip(before, after))


def _joined(parts: Tensor, run: Sequence[int], removed: Dims) -> Tensor:
    """Parts [size of each axis of `run`, *local shape] as one tensor: each dim's parts in the
    order of the axes that sharded it.
    """
    shape = parts.shape[len(run) :]
    order = [
        [*(run.index(axis) for axis in axes), len(run) + dim] for dim, axes in enumerate(removed)
    ]
    lengths = [math.prod(parts.shape[at] for at in dims) for dims in order]
    assert len(lengths) == len(shape)
    return parts.permute([at for dims in order for at in dims]).reshape(lengths)


def _packed(x: Tensor, mine: Box, boxes: Sequence[Box]) -> Tensor:
    """The boxes of `x`, which is `mine`, one behind the other."""
    packed = x.new_empty(x.numel())
    for piece, box in zip(packed.split([*map(_numel, boxes)]), boxes):
        piece.view(_lengths(box)).copy_(x[_within(mine, box)])
    return packed


def _unpacked(packed: Tensor, own: Box, boxes: Sequence[Box]) -> Tensor:
    """A tensor that is `own`, of the boxes one behind the other."""
    result = packed.new_empty(_lengths(own))
    for piece, box in zip(packed.split([*map(_numel, boxes)]), boxes):
        result[_within(own, box)].copy_(piece.view(_lengths(box)))
    return result


def _overlap(a: Box, b: Box) -> Box:
    return tuple((max(i, k), max(min(j, m), max(i, k))) for (i, j), (k, m) in zip(a, b))


def _within(outer: Box, box: Box) -> tuple[slice, ...]:
    """Index of `box` in a tensor that holds `outer`."""
    return tuple(slice(i - k, j - k) for (i, j), (k, _) in zip(box, outer))


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _numel(box: Box) -> int:
    return math.prod(_lengths(box))
