"""One question, answered in one place: which slice of which global tensor is this?

Clipping, checkpoints, verification and memory accounting only read layouts; they know no strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class Layout:
    """Where a local tensor lies in its global tensor.

    `slices` are [start, stop) of the global tensor along each dim; `padding` counts further local entries along
    each dim that stand for nothing and stay zero. `sharded` names the axes that the tensor is split on; on every
    other axis it is replicated. `replica` marks a copy that another rank owns beyond that (a tied embedding at the
    head, a key-value head that several tensor ranks share).
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    padding: tuple[int, ...]
    sharded: tuple[str, ...] = ()
    replica: bool = False

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], replica: bool = False) -> Layout:
        """The layout of a tensor that is not split."""
        return cls(name, shape, tuple((0, n) for n in shape), (0,) * len(shape), replica=replica)

    def split(self, dim: int, axis: MeshAxis) -> Layout:
        """This layout, further split along `dim` into `axis.size` equal pieces, padded where it does not divide."""
        start, stop = self.slices[dim]
        piece = -(-(stop - start) // axis.size)
        first = min(start + axis.index * piece, stop)
        last = min(first + piece, stop)
        return replace(
            self,
            slices=_with(self.slices, dim, (first, last)),
            padding=_with(self.padding, dim, piece - (last - first)),
            sharded=(*self.sharded, axis.name),
        )

    def share(self, dim: int, axis: MeshAxis, pieces: int) -> Layout:
        """This layout, cut along `dim` into fewer equal pieces than `axis` has ranks; neighbours hold the same."""
        (start, stop), ranks = self.slices[dim], axis.size // pieces
        assert axis.size % pieces == 0 and (stop - start) % pieces == 0, (self, axis.size, pieces)
        size = (stop - start) // pieces
        first = start + axis.index // ranks * size
        return replace(
            self,
            slices=_with(self.slices, dim, (first, first + size)),
            sharded=(*self.sharded, axis.name),
            replica=self.replica or axis.index % ranks > 0,
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, padding included."""
        return tuple(stop - start + pad for (start, stop), pad in zip(self.slices, self.padding))

    def take(self, whole: Tensor) -> Tensor:
        """The local tensor out of the global one, padded with zeros; always a tensor of its own."""
        local = whole.new_zeros(self.local_shape)
        self.valid(local).copy_(whole[tuple(slice(*s) for s in self.slices)])
        return local

    def put(self, local: Tensor, whole: Tensor) -> None:
        """Write the local tensor's part into the global one."""
        whole[tuple(slice(*s) for s in self.slices)] = self.valid(local)

    def valid(self, local: Tensor) -> Tensor:
        """The part of a local tensor that is not padding, as a view."""
        return local[tuple(slice(0, stop - start) for start, stop in self.slices)]

    def owned(self, mesh: Mesh) -> bool:
        """Whether this rank is the one that counts and saves this slice (the first of its replicas)."""
        others = (a for a in mesh.axes.values() if a.name not in self.sharded and a.name != "pipeline")
        return not self.replica and all(axis.index == 0 for axis in others)


def _with(values: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def square_norm(gradients: dict[str, Tensor], layouts: dict[str, Layout], mesh: Mesh) -> Tensor:
    """This rank's share of the squared global gradient norm: the slices it owns; a scalar of fp32 or better.

    Summed over all ranks it is the square of one device's norm, on every mesh.
    """
    some = next(iter(gradients.values()))
    dtype = torch.float64 if some.dtype == torch.float64 else torch.float32
    owned = [g for name, g in gradients.items() if layouts[name].owned(mesh)]
    if not owned:
        return torch.zeros((), dtype=dtype, device=some.device)
    return torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in owned]).square().sum()
