"""Single steps from one layout of a tensor to another: a slice, or one collective.

Joint collectives run over neighboring axes of the mesh, for which there are process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from workbench.plan.operators.tensor_layout import Dims, TensorLayout

MAX_ANY_ORDER = 3
"""Axes up to which a dim takes several axes in any order. Of more it takes them in the mesh's,
which leaves out few sequences of collectives and most of the layouts between.
"""
Kind = Literal["slice", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"]


class Move(NamedTuple):
    """One step over the group that spans `axes`."""

    kind: Kind
    axes: tuple[int, ...]
    layout: TensorLayout
    """Afterwards."""
    parts: tuple[int, ...]
    """Of each dim, afterwards."""


def neighbors(axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Runs of neighboring axes: the groups that collectives may span."""
    return tuple(tuple(axes[i:j]) for i in range(len(axes)) for j in range(i + 1, len(axes) + 1))


@lru_cache(maxsize=1 << 16)
def moves(layout: TensorLayout, sizes: tuple[int, ...]) -> tuple[Move, ...]:
    """All steps from a layout on a mesh of these `sizes`; axes of size 1 take no part.

    Only the innermost axes of a dim can be gathered, exchanged or added, so that what a rank holds
    stays contiguous in the global tensor.
    """
    return tuple(_moves(layout, sizes))


@lru_cache(maxsize=1 << 16)
def moves_within(
    layout: TensorLayout, sizes: tuple[int, ...], parts: tuple[int, ...]
) -> tuple[tuple[Move, int], ...]:
    """Those of `moves` after which the parts of each dim divide `parts`, with the parts of all dims
    together.
    """
    return tuple((move, math.prod(move.parts)) for move in _moves(layout, sizes, parts))


def _moves(
    layout: TensorLayout, sizes: tuple[int, ...], parts: tuple[int, ...] | None = None
) -> Iterator[Move]:
    """Steps; where it is given, to layouts whose parts of each dim divide `parts`."""
    dims, partial = layout
    idle = [axis for axis, size in enumerate(sizes) if size == 1]
    taken, add = {*layout.sharding, *partial, *idle}, _Adding(sizes, parts)

    def to(kind: Kind, group: tuple[int, ...], kept: Dims, left: tuple[int, ...]) -> Iterator[Move]:
        for added in add(kept, group):
            target = TensorLayout(added, left)
            if target != layout:
                yield Move(kind, group, target, target.num_parts(sizes))

    for axis in range(len(sizes)):
        if axis not in taken:
            yield from to("slice", (axis,), dims, partial)
    for group in neighbors(range(len(sizes))):
        left = tuple(a for a in partial if a not in group)
        outer = without(dims, group)
        if len(left) + len(group) == len(partial):
            yield Move("all_reduce", group, TensorLayout(dims, left), layout.num_parts(sizes))
            yield from to("reduce_scatter", group, dims, left)
        elif outer is not None:
            gathered = TensorLayout(outer, partial)
            yield Move("all_gather", group, gathered, gathered.num_parts(sizes))
            yield from to("all_to_all", group, outer, partial)


def without(dims: Dims, group: Sequence[int]) -> Dims | None:
    """`dims` without the axes of `group`, which must be the innermost ones of dims."""
    outer = tuple(tuple(a for a in axes if a not in group) for axes in dims)
    removed = sum(map(len, dims)) - sum(map(len, outer))
    innermost = all(axes[: len(kept)] == kept for axes, kept in zip(dims, outer))
    return outer if removed == len(group) and innermost else None


class _Adding:
    """Adds axes as the innermost ones of any dims.

    Args:
        sizes: Of the mesh's axes.
        parts: What the parts of each dim then divide; None: any number.
    """

    def __init__(self, sizes: tuple[int, ...], parts: tuple[int, ...] | None) -> None:
        self.sizes, self.parts = sizes, parts
        self.any_order = sum(size > 1 for size in sizes) <= MAX_ANY_ORDER

    def __call__(self, dims: Dims, group: tuple[int, ...]) -> Iterable[Dims]:
        """`dims` with the axes of `group` added to any of them, in any order."""
        if not group:
            return (dims,)
        found: dict[Dims, None] = {}
        for axis in group if self.any_order else group[:1]:
            rest = tuple(a for a in group if a != axis)
            for dim, axes in enumerate(dims):
                if self._divides(dim, (*axes, axis)):
                    added = (*dims[:dim], (*axes, axis), *dims[dim + 1 :])
                    found |= dict.fromkeys(self(added, rest))
        return found

    def _divides(self, dim: int, axes: tuple[int, ...]) -> bool:
        if self.parts is None:
            return True
        return self.parts[dim] % math.prod(self.sizes[axis] for axis in axes) == 0
