"""How tensors enter and leave one operator: redistributed to what its strategy says, by DTensor's
placements.

Inside, everything is plain and local. Outside, a tensor that every rank holds whole is plain; one
that is split is a DTensor, and whoever does not know what to do with it gets it whole. Sums over
ranks are made where they arise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Placed

from workbench.plan.operator_strategy import Placement

Placements = tuple[Placed, ...]
"""One an axis of the grid."""


@dataclass(eq=False)
class Shared:
    """Inputs that sibling modules have in common, laid out once: their gradients add up before they
    are moved.

    Held no longer than their parent's forward.
    """

    laid: dict[tuple[int, Placements], tuple[Tensor, DTensor]] = field(default_factory=dict)

    def lay(self, x: Tensor, mesh: DeviceMesh, wanted: Placements) -> DTensor:
        """`x` as `wanted`; a plain tensor is one that every rank holds whole."""
        key = id(x), wanted
        if key not in self.laid:
            whole = x if isinstance(x, DTensor) else _placed(x, mesh, (Replicate(),) * mesh.ndim)
            laid = whole if whole.placements == wanted else whole.redistribute(mesh, wanted)
            self.laid[key] = x, laid
        return self.laid[key][1]

    def forget(self, *_: Any) -> None:
        """The parent's forward is over."""
        self.laid.clear()


@dataclass(frozen=True)
class Split:
    """One operator's strategy on the grid: the dimension that each axis splits, None where it
    repeats the work.

    Methods take the place of each dimension in the tensor at hand, e.g. `rows=0, inner=-1`.
    """

    mesh: DeviceMesh
    placement: Placement
    shared: Shared

    def lies(self, num_dims: int, dims: dict[str, int]) -> Placements:
        """How a tensor lies here: split by those of its dimensions that the strategy splits, else
        whole.
        """
        return tuple(
            Shard(dims[name] % num_dims) if name is not None and name in dims else Replicate()
            for name in self.placement
        )

    def sums(self, num_dims: int, dims: dict[str, int]) -> Placements:
        """The same, where ranks that split a dimension which the tensor lacks hold parts of its
        sum.
        """
        lies = self.lies(num_dims, dims)
        return tuple(
            Partial() if name is not None and name not in dims else at
            for name, at in zip(self.placement, lies)
        )

    def enter(self, x: Tensor, **dims: int) -> Tensor:
        """This rank's part of an input, plain; its gradient is summed over the ranks that split
        what it lacks.
        """
        wanted, gradient = self.lies(x.ndim, dims), self.sums(x.ndim, dims)
        if not isinstance(x, DTensor) and _whole(gradient):
            return x
        local: Tensor = self.shared.lay(x, self.mesh, wanted).to_local(grad_placements=gradient)
        return local

    def settled(self, y: Tensor, **dims: int) -> Tensor:
        """A local result, summed over the ranks that split what it lacks."""
        partial, wanted = self.sums(y.ndim, dims), self.lies(y.ndim, dims)
        if partial == wanted:
            return y
        local: Tensor = _placed(y, self.mesh, partial).redistribute(self.mesh, wanted).to_local()
        return local

    def leave(self, y: Tensor, **dims: int) -> Tensor:
        """A local result with its placement; plain where every rank holds it whole."""
        at = self.lies(y.ndim, dims)
        return y if _whole(at) else _placed(y, self.mesh, at)

    def only(self, name: str) -> Split:
        """The same without what is not of dimension `name`."""
        return replace(
            self, placement=tuple(each if each == name else None for each in self.placement)
        )


def moved(
    y: Tensor, one: Split, dims: dict[str, int], other: Split, wanted: dict[str, int]
) -> Tensor:
    """A local result of one operator as the local input of another."""
    placed = _placed(y, one.mesh, one.lies(y.ndim, dims))
    local: Tensor = placed.redistribute(one.mesh, other.lies(y.ndim, wanted)).to_local()
    return local


def _placed(local: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _whole(placements: Iterable[Placed]) -> bool:
    return all(isinstance(placement, Replicate) for placement in placements)


def whole(x: Any) -> Any:
    """A tensor as every rank can use it: gathered where it is split; anything else as it is."""
    return (
        x.redistribute(placements=(Replicate(),) * x.device_mesh.ndim).to_local()
        if isinstance(x, DTensor)
        else x
    )
