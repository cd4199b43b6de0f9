"""How a tensor lies on a mesh: which axes shard each dim, and over which it is still a sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Dims = tuple[tuple[int, ...], ...]
"""For each dim of a tensor the axes that shard it, outermost first."""


class TensorLayout(NamedTuple):
    """A tensor on a mesh whose axes are numbered from 0, the outermost.

    Axes that are in neither field hold the same (replicate).
    """

    dims: Dims
    """`(0, 1)` of a dim: it is in parts over axis 0, each of them in parts over axis 1."""
    partial: tuple[int, ...] = ()
    """Axes whose ranks hold terms of a sum, in ascending order."""

    @classmethod
    def placed(
        cls, at: Sequence[int | None], num_dims: int, partial: Iterable[int] = ()
    ) -> TensorLayout:
        """The layout in which each axis shards the dim `at` it, or none; axes of one dim in the
        mesh's order.
        """
        dims = (tuple(a for a, dim in enumerate(at) if dim == d) for d in range(num_dims))
        return cls(tuple(dims), tuple(partial))

    @property
    def sharding(self) -> tuple[int, ...]:
        """Axes that shard a dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def summed(self) -> TensorLayout:
        """The same once partial sums are reduced: equal on the ranks that held terms."""
        return TensorLayout(self.dims)

    def has_alike(self, a: int, b: int) -> bool:
        """Whether `b` shards right within `a`, or neither shards and both or none are partial."""
        for axes in self.dims:
            if a in axes or b in axes:
                return (a, b) in pairwise(axes)
        return (a in self.partial) == (b in self.partial)

    def of_dims(self, num_dims: int) -> TensorLayout:
        """The same of a tensor that has more dims, the last of which are not sharded."""
        return self._replace(dims=self.dims + ((),) * (num_dims - len(self.dims)))

    def num_parts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Parts of each dim on a mesh of these `sizes`."""
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.dims)

    def at(self, num_axes: int) -> tuple[int | None, ...]:
        """For each axis the dim that it shards, None where it shards none."""
        found: list[int | None] = [None] * num_axes
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                found[axis] = dim
        return tuple(found)
