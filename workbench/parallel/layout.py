"""One question, answered in one place: which slice of which global tensor is this?

Clipping, checkpoints, verification and memory accounting only read layouts; they know no strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.mesh import Mesh, MeshAxis

Slices = tuple[tuple[int, int], ...]
"""[start, stop) along each dim."""


@dataclass(frozen=True)
class Layout:
    """Where a local tensor lies in its global tensor.

    `slices` are [start, stop) of the global tensor along each dim; `padding` counts further local
    entries along each dim that stand for nothing and stay zero. `copies` names the axes along which
    other ranks hold the same. `replica` marks a copy that another rank owns beyond that (a tied
    embedding at the head, a key-value head that several tensor ranks share). `flat`, where it is
    set, says that the local tensor is one-dimensional and holds only entries [start, stop) of what
    is described so far, counted row by row (a shard of ZeRO's).
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    padding: tuple[int, ...]
    copies: tuple[str, ...] = ("tensor", "replicas")
    replica: bool = False
    flat: tuple[int, int] | None = None

    @classmethod
    def whole(
        cls,
        name: str,
        shape: tuple[int, ...],
        replica: bool = False,
        copies: tuple[str, ...] = ("tensor", "replicas"),
    ) -> Layout:
        """The layout of a tensor that is not split."""
        return cls(name, shape, tuple((0, n) for n in shape), (0,) * len(shape), copies, replica)

    def split(self, dim: int, axis: MeshAxis) -> Layout:
        """This layout, further split along `dim` into `axis.size` equal pieces, padded where it
        does not divide.
        """
        length = self.slices[dim][1] - self.slices[dim][0]
        piece = -(-length // axis.size)
        start = min(axis.index * piece, length)
        return self.cut(dim, axis, (start, min(start + piece, length)), piece)

    def cut(
        self, dim: int, axis: MeshAxis, kept: tuple[int, int], room: int, replica: bool = False
    ) -> Layout:
        """This layout where each rank on `axis` keeps its own entries `kept` = [start, stop) along
        `dim`, of those that are here, and has `room` for more; `replica` where a rank before this
        one keeps the same.
        """
        first = self.slices[dim][0]
        assert 0 <= kept[0] <= kept[1] <= self.slices[dim][1] - first, (self, dim, kept)
        return replace(
            self.differing(axis.name),
            slices=_with(self.slices, dim, (first + kept[0], first + kept[1])),
            padding=_with(self.padding, dim, room - (kept[1] - kept[0])),
            replica=self.replica or replica,
        )

    def differing(self, axis: str, but: tuple[str, ...] = ()) -> Layout:
        """This layout where ranks along `axis` hold different things, except those along its parts
        `but`.
        """
        assert axis in self.copies, (self, axis)
        return replace(self, copies=tuple(name for name in self.copies if name != axis) + but)

    def flattened(self, start: int, stop: int) -> Layout:
        """Entries [start, stop) of the local tensor, row by row, in one dimension."""
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
        return tuple(stop - start + pad for (start, stop), pad in zip(self.slices, self.padding))

    def parts(self, local: Tensor) -> Iterator[tuple[Tensor, Slices]]:
        """What of a local tensor is not padding, as views, each with its slices of the global
        tensor.

        One part, unless the layout is flat: then a box for every run of rows that it holds of.
        """
        if self.flat is None:
            yield local[tuple(slice(0, stop - start) for start, stop in self.slices)], self.slices
            return
        box = replace(self, flat=None)
        for begin, local_slices in _boxes(box.local_shape, *self.flat):
            extent = [stop - start for start, stop in local_slices]
            view = local[begin - self.flat[0] :][: math.prod(extent)].view(extent)
            kept = tuple(
                (min(a, stop - start), min(b, stop - start))
                for (a, b), (start, stop) in zip(local_slices, self.slices)
            )
            if all(a < b for a, b in kept):
                inner = tuple(slice(0, b - a) for a, b in kept)
                yield (
                    view[inner],
                    tuple((start + a, start + b) for (a, b), (start, _) in zip(kept, self.slices)),
                )

    def take(self, whole: Tensor) -> Tensor:
        """The local tensor out of the global one, padded with zeros; always a tensor of its own."""
        local = whole.new_zeros(self.local_shape)
        for view, slices in self.parts(local):
            view.copy_(whole[_index(slices)])
        return local

    def put(self, local: Tensor, whole: Tensor) -> None:
        """Write the local tensor's part into the global one."""
        for view, slices in self.parts(local):
            whole[_index(slices)] = view

    def held(self) -> int:
        """Entries that are not padding."""
        local = torch.empty(self.local_shape, device="meta")
        return sum(part.numel() for part, _ in self.parts(local))

    def owned(self, mesh: Mesh) -> bool:
        """Whether this rank is the one that counts and saves this slice (the first of its
        replicas).
        """
        return not self.replica and all(mesh[name].index == 0 for name in self.copies)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Slices]]:
    """Entries [start, stop) of a tensor, row by row, as boxes: (place of the first entry,
    slices).
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


def _with(values: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def square_norm(gradients: dict[str, Tensor], layouts: dict[str, Layout], mesh: Mesh) -> Tensor:
    """This rank's share of the squared global gradient norm: the slices it owns; a scalar of fp32
    or better.

    Summed over all ranks it is the square of one device's norm, on every mesh.
    """
    some = next(iter(gradients.values()))
    dtype = torch.float64 if some.dtype == torch.float64 else torch.float32
    owned = [g for name, g in gradients.items() if layouts[name].owned(mesh)]
    if not owned:
        return torch.zeros((), dtype=dtype, device=some.device)
    return torch.stack(torch._foreach_norm(owned, dtype=dtype)).square().sum()
