"""Single steps from one layout of a tensor to another: a slice, or one collective.

Joint collectives run over neighboring axes of the mesh, for which there are process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from workbench.plan.operators.tensor_layout import Dims, TensorLayout

Kind = Literal["slice", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"]
SHARDING = ("slice", "all_to_all", "reduce_scatter")
"""Kinds after which the group's axes shard dims."""


class Moves(NamedTuple):
    """Steps of one kind over the group that spans `axes`. They cost the same, whichever dims its
    axes shard afterwards: of a dear one the layouts need not be made.
    """

    kind: Kind
    axes: tuple[int, ...]
    dims: Dims
    """Axes that shard each dim, without those of the group where that moves."""
    partial: tuple[int, ...]
    """Afterwards."""
    parts: int
    """Of the tensor, afterwards."""

    def layouts(
        self, before: TensorLayout, sizes: tuple[int, ...], parts: tuple[int, ...]
    ) -> Iterator[TensorLayout]:
        """Layouts afterwards in which the parts of each dim divide `parts`.

        Args:
            before: The layout that the tensor has.
            sizes: Of the mesh's axes.
            parts: The most parts of each dim.
        """
        added = self.axes if self.kind in SHARDING else ()
        for dims in _appended(self.dims, added, sizes, parts):
            if self.kind != "all_to_all" or dims != before.dims:
                yield TensorLayout(dims, self.partial)


def neighbors(axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Runs of neighboring axes: the groups that collectives may span."""
    return tuple(tuple(axes[i:j]) for i in range(len(axes)) for j in range(i + 1, len(axes) + 1))


@lru_cache(maxsize=1 << 16)
def moves(layout: TensorLayout, sizes: tuple[int, ...]) -> tuple[Moves, ...]:
    """All steps from a layout on a mesh of these `sizes`; axes of size 1 take no part.

    Only the innermost axes of a dim can be gathered, exchanged or added, so that what a rank holds
    stays contiguous in the global tensor.
    """
    slices, axes = _slices(layout, sizes), range(len(sizes))
    joint = (step for group in neighbors(axes) for step in _collectives(layout, sizes, group))
    return (*slices, *joint)


def _slices(layout: TensorLayout, sizes: tuple[int, ...]) -> Iterator[Moves]:
    parts = math.prod(layout.num_parts(sizes))
    for axis, size in enumerate(sizes):
        if size > 1 and axis not in (*layout.sharding, *layout.partial):
            yield Moves("slice", (axis,), *layout, parts * size)


def _collectives(
    layout: TensorLayout, sizes: tuple[int, ...], group: tuple[int, ...]
) -> Iterator[Moves]:
    dims, partial = layout
    parts, ranks = (math.prod(n) for n in (layout.num_parts(sizes), (sizes[a] for a in group)))
    left = tuple(a for a in partial if a not in group)
    outer = without(dims, group)
    if len(left) + len(group) == len(partial):
        yield Moves("all_reduce", group, dims, left, parts)
        yield Moves("reduce_scatter", group, dims, left, parts * ranks)
    elif outer is not None:
        yield Moves("all_gather", group, outer, partial, parts // ranks)
        yield Moves("all_to_all", group, outer, partial, parts)


def without(dims: Dims, group: Sequence[int]) -> Dims | None:
    """`dims` without the axes of `group`, which must be the innermost ones of dims."""
    outer = tuple(tuple(a for a in axes if a not in group) for axes in dims)
    removed = sum(map(len, dims)) - sum(map(len, outer))
    innermost = all(axes[: len(kept)] == kept for axes, kept in zip(dims, outer))
    return outer if removed == len(group) and innermost else None


@lru_cache(maxsize=1 << 16)
def _appended(
    dims: Dims, group: tuple[int, ...], sizes: tuple[int, ...], parts: tuple[int, ...]
) -> tuple[Dims, ...]:
    """`dims` with the axes of `group` added as the innermost ones of any dims, in any order, where
    the parts of these dims still divide `parts`.
    """
    if not group:
        return (dims,)
    found: dict[Dims, None] = {}
    for axis in group:
        rest = tuple(a for a in group if a != axis)
        for dim, axes in enumerate(dims):
            if parts[dim] % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                added = (*dims[:dim], (*axes, axis), *dims[dim + 1 :])
                found |= dict.fromkeys(_appended(added, rest, sizes, parts))
    return tuple(found)
