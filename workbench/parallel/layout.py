"""Sharding layouts: which slice of which global tensor is this local tensor?

Every parallel axis records its sharding here (what DTensor's placements are elsewhere, with uneven
shards). Clipping, checkpoints, verification and memory accounting read layouts only, and know no
strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.mesh import Mesh, MeshAxis

Slices = tuple[tuple[int, int], ...]
"""[start, stop) along each dim."""


@dataclass(frozen=True)
class Layout:
    """Where a local tensor lies in its global tensor.

    Attributes:
        name: Of the global tensor.
        shape: Of the global tensor.
        slices: [start, stop) of the global tensor along each dim.
        padding: Number of local entries along each dim beyond `slices`; they stay zero.
        replicated_over: Axes along which other ranks hold the same slices.
        replica: Whether this is a copy that another rank owns, beyond `replicated_over`: a tied
            embedding at the head, or a key-value head that several tensor ranks share (GQA).
        flat: If set, the local tensor is 1-D: entries [start, stop) of what is described so far,
            in row-major order (a ZeRO shard).
        strided: (dim, count, stride): the slice of `dim` comes `count` times, each `stride`
            further: the same heads of query, key and value in one packed projection.
        dtype: Of the tensor, where it is not that of all parameters: bytes of a weight in 4 bits.
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    padding: tuple[int, ...]
    replicated_over: tuple[str, ...] = ("tensor", "replicas")
    replica: bool = False
    flat: tuple[int, int] | None = None
    strided: tuple[tuple[int, int, int], ...] = ()
    dtype: torch.dtype | None = None

    @classmethod
    def unsharded(
        cls,
        name: str,
        shape: tuple[int, ...],
        replica: bool = False,
        replicated_over: tuple[str, ...] = ("tensor", "replicas"),
    ) -> Layout:
        """The layout of a tensor that is not sharded."""
        return cls(
            name, shape, tuple((0, n) for n in shape), (0,) * len(shape), replicated_over, replica
        )

    def split(self, dim: int, axis: MeshAxis) -> Layout:
        """This layout, sharded evenly along `dim` over `axis`, padded where it does not divide."""
        length = self.slices[dim][1] - self.slices[dim][0]
        size = -(-length // axis.size)
        start = min(axis.index * size, length)
        return self.split_at(dim, axis, (start, min(start + size, length)), size)

    def split_at(
        self,
        dim: int,
        axis: MeshAxis,
        bounds: tuple[int, int],
        num_local: int,
        replica: bool = False,
    ) -> Layout:
        """This layout, sharded along `dim` over `axis` at given bounds.

        Args:
            dim: Of the global tensor.
            axis: Its ranks hold different slices.
            bounds: [start, stop) of this rank's shard, relative to its present slice.
            num_local: Local size of the dim, padding included.
            replica: Whether an earlier rank of the axis has the same shard.
        """
        first = self.slices[dim][0]
        start, stop = bounds
        assert 0 <= start <= stop <= self.slices[dim][1] - first, (self, dim, bounds)
        return replace(
            self.sharded_over(axis.name),
            slices=_replaced(self.slices, dim, (first + start, first + stop)),
            padding=_replaced(self.padding, dim, num_local - (stop - start)),
            replica=self.replica or replica,
        )

    def split_strided(
        self, dim: int, axes: tuple[str, ...], bounds: tuple[int, int], count: int, stride: int
    ) -> Layout:
        """This layout, sharded along an unsharded `dim` over `axes`: [start, stop) of each of
        `count` equal parts of `stride` entries.
        """
        assert self.slices[dim] == (0, count * stride), (self, dim, count, stride)
        layout = self
        for axis in axes:
            layout = layout.sharded_over(axis)
        more = ((dim, count, stride),) if count > 1 else ()
        return replace(
            layout, slices=_replaced(self.slices, dim, bounds), strided=(*self.strided, *more)
        )

    def tile(self, index: int, count: int) -> Layout:
        """Tile `index` of an unsharded tensor, in `count` of equal numbers of rows, all of which
        this rank holds.
        """
        rows = self.shape[0] // count
        assert self.slices[0] == (0, rows * count), (self, count)
        bounds = index * rows, (index + 1) * rows
        return replace(self, slices=_replaced(self.slices, 0, bounds))

    def sharded_over(self, axis: str, but: tuple[str, ...] = ()) -> Layout:
        """This layout, with different contents along `axis`, except along its sub-axes `but`."""
        assert axis in self.replicated_over, (self, axis)
        return replace(
            self, replicated_over=tuple(name for name in self.replicated_over if name != axis) + but
        )

    def flattened(self, start: int, stop: int) -> Layout:
        """Entries [start, stop) of the local tensor in row-major order, as a 1-D shard."""
        assert self.flat is None and 0 <= start <= stop <= math.prod(self.local_shape), (
            self,
            start,
            stop,
        )
        return replace(self, flat=(start, stop))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, padding included."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        counts = {dim: count for dim, count, _ in self.strided}
        return tuple(
            (stop - start) * counts.get(dim, 1) + pad
            for dim, ((start, stop), pad) in enumerate(zip(self.slices, self.padding))
        )

    def parts(self, local: Tensor) -> Iterator[tuple[Tensor, Slices]]:
        """The local tensor without padding, as views, each with its slices of the global tensor.

        It is one view, unless the layout is flat or strided: a 1-D shard begins and ends within
        rows, and is a few boxes of the global tensor.
        """
        if self.flat is None and not self.strided:
            yield local[tuple(slice(0, stop - start) for start, stop in self.slices)], self.slices
            return
        for view, box in self._local_boxes(local):
            for runs in product(*(self._runs(dim, *ends) for dim, ends in enumerate(box))):
                inner = tuple(slice(a - b, c - b) for (a, c, _), (b, _) in zip(runs, box))
                yield view[inner], tuple((start, start + c - a) for a, c, start in runs)

    def _local_boxes(self, local: Tensor) -> Iterator[tuple[Tensor, Slices]]:
        """The local tensor as boxes of its unflattened self, padding included."""
        if self.flat is None:
            yield local, tuple((0, size) for size in local.shape)
            return
        for begin, box in _boxes(replace(self, flat=None).local_shape, *self.flat):
            extent = [stop - start for start, stop in box]
            yield local[begin - self.flat[0] :][: math.prod(extent)].view(extent), box

    def _runs(self, dim: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Local entries [start, stop) of a dim without padding, as runs (start, stop, where the run
        starts in the global tensor).
        """
        first, last = self.slices[dim]
        length, known = last - first, {each[0]: each[1:] for each in self.strided}
        count, stride = known.get(dim, (1, 0))
        for part in range(count):
            begin, end = max(start, part * length), min(stop, (part + 1) * length)
            if begin < end:
                yield begin, end, first + part * stride + begin - part * length

    def take(self, global_tensor: Tensor) -> Tensor:
        """A new local tensor with its slices of the global one, padded with zeros."""
        local = global_tensor.new_zeros(self.local_shape)
        self.copy_slices(global_tensor, local)
        return local

    def copy_slices(self, global_tensor: Tensor, local: Tensor) -> None:
        """Copy the local tensor's slices of the global one into it; padding is left as it is."""
        for view, slices in self.parts(local):
            view.copy_(global_tensor[_index(slices)])

    def put(self, local: Tensor, global_tensor: Tensor) -> None:
        """Write the local tensor into its slices of the global one."""
        for view, slices in self.parts(local):
            global_tensor[_index(slices)] = view

    def num_elements(self) -> int:
        """Number of local entries that are not padding."""
        local = torch.empty(self.local_shape, device="meta")
        return sum(part.numel() for part, _ in self.parts(local))

    def is_owner(self, mesh: Mesh) -> bool:
        """Whether this rank counts and saves this slice: the first of those that hold it."""
        return not self.replica and all(mesh[name].index == 0 for name in self.replicated_over)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Slices]]:
    """Entries [start, stop) of a tensor in row-major order, as boxes (first entry, slices).

    The end of a row, the full rows, and the beginning of a row; the two ends are divided likewise
    along the next dim.
    """
    if start >= stop:
        return
    if not shape:
        yield start, ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        first = last = start // row
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield first * row, ((first, last), *((0, n) for n in shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[int, Slices]]:
    for begin, slices in _boxes(shape[1:], start, min(stop, math.prod(shape[1:]))):
        yield row * math.prod(shape[1:]) + begin, ((row, row + 1), *slices)


def _index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in slices)


def _replaced(values: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def square_norm(gradients: dict[str, Tensor], layouts: dict[str, Layout], mesh: Mesh) -> Tensor:
    """This rank's share of the squared global gradient norm.

    It counts the slices that this rank owns: summed over all ranks it is the squared norm of the
    global gradients, on every mesh.

    Args:
        gradients: Local gradients by parameter name; padding is zero.
        layouts: Layout of each of them.
        mesh: Says which of several copies of a slice this rank owns.

    Returns:
        A scalar, in fp64 for fp64 gradients and in fp32 otherwise.
    """
    first = next(iter(gradients.values()))
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    owned = [g for name, g in gradients.items() if layouts[name].is_owner(mesh)]
    if not owned:
        return torch.zeros((), dtype=dtype, device=first.device)
    return torch.stack(torch._foreach_norm(owned, dtype=dtype)).square().sum()
