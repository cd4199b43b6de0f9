"""Single steps from one layout of a tensor to another: a slice, or one collective.

Joint collectives run over neighboring axes of the mesh, for which there are process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from workbench.plan.operators.tensor_layout import Dims, TensorLayout

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
    idle = [axis for axis, size in enumerate(sizes) if size == 1]
    return tuple(
        Move(kind, axes, target, target.num_parts(sizes))
        for kind, axes, target in _moves(layout, len(sizes), idle)
    )


@lru_cache(maxsize=1 << 16)
def moves_within(
    layout: TensorLayout, sizes: tuple[int, ...], parts: tuple[int, ...]
) -> tuple[tuple[Move, int], ...]:
    """Those of `moves` after which the parts of each dim divide `parts`, with the parts of all dims
    together.
    """
    return tuple(
        (move, math.prod(move.parts))
        for move in moves(layout, sizes)
        if not any(n % p for n, p in zip(parts, move.parts))
    )


def _moves(
    layout: TensorLayout, num_axes: int, idle: Sequence[int]
) -> Iterator[tuple[Kind, tuple[int, ...], TensorLayout]]:
    dims, partial = layout
    taken = {*layout.sharding, *partial, *idle}
    for axis in range(num_axes):
        if axis not in taken:
            for added in _appended(dims, (axis,)):
                yield "slice", (axis,), TensorLayout(added, partial)
    for group in neighbors(range(num_axes)):
        left = tuple(a for a in partial if a not in group)
        outer = without(dims, group)
        if len(left) + len(group) == len(partial):
            yield "all_reduce", group, TensorLayout(dims, left)
            for added in _appended(dims, group):
                yield "reduce_scatter", group, TensorLayout(added, left)
        elif outer is not None:
            yield "all_gather", group, TensorLayout(outer, partial)
            for added in _appended(outer, group):
                if added != dims:
                    yield "all_to_all", group, TensorLayout(added, partial)


def without(dims: Dims, group: Sequence[int]) -> Dims | None:
    """`dims` without the axes of `group`, which must be the innermost ones of dims."""
    outer = tuple(tuple(a for a in axes if a not in group) for axes in dims)
    removed = sum(map(len, dims)) - sum(map(len, outer))
    innermost = all(axes[: len(kept)] == kept for axes, kept in zip(dims, outer))
    return outer if removed == len(group) and innermost else None


def _appended(dims: Dims, group: tuple[int, ...]) -> Iterable[Dims]:
    """`dims` with the axes of `group` added as the innermost ones of any dims, in any order."""
    if not group:
        return (dims,)
    found: dict[Dims, None] = {}
    for axis in group:
        rest = tuple(a for a in group if a != axis)
        for dim, axes in enumerate(dims):
            added = (*dims[:dim], (*axes, axis), *dims[dim + 1 :])
            found |= dict.fromkeys(_appended(added, rest))
    return found
