"""DTensor redistribution at the borders of an operator, to the sharding of its strategy.

Within an operator tensors are local and plain. Between operators a tensor that every rank holds
unsharded is plain, and a sharded one is a DTensor; code that cannot handle a DTensor gets the
replicated tensor. Partial results are reduced where they arise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from workbench.plan.operators.strategy_form import Placement

DTensorPlacements = tuple[DTensorPlacement, ...]
"""One placement for each axis of the operator grid."""


@dataclass(eq=False)
class SharedInputs:
    """Inputs that several modules of one parent read, redistributed once.

    Their gradients are then added before the one redistribution of backward. Inputs stay
    referenced until the parent's forward is over, which also keeps their ids valid as keys.
    """

    redistributed: dict[tuple[int, DTensorPlacements], tuple[Tensor, DTensor]] = field(
        default_factory=dict
    )

    def redistribute(self, x: Tensor, mesh: DeviceMesh, wanted: DTensorPlacements) -> DTensor:
        """`x` with the `wanted` placements; a plain tensor is replicated."""
        key = id(x), wanted
        if key not in self.redistributed:
            source = (
                x if isinstance(x, DTensor) else _as_dtensor(x, mesh, (Replicate(),) * mesh.ndim)
            )
            result = source if source.placements == wanted else source.redistribute(mesh, wanted)
            self.redistributed[key] = x, result
        return self.redistributed[key][1]

    def clear(self, *_: Any) -> None:
        """Forward hook of the parent: release the inputs."""
        self.redistributed.clear()


@dataclass(frozen=True)
class OperatorSharding:
    """One operator's strategy on the grid: the dimension that each axis shards, None to replicate.

    Methods take the dim of each named dimension in the tensor at hand, e.g. `rows=0, inner=-1`.
    """

    mesh: DeviceMesh
    placement: Placement
    shared: SharedInputs

    def placements(self, num_dims: int, dims: dict[str, int]) -> DTensorPlacements:
        """Placements of a tensor that has `dims`: sharded along those that the strategy shards."""
        return tuple(
            Shard(dims[name] % num_dims) if name is not None and name in dims else Replicate()
            for name in self.placement
        )

    def partial_placements(self, num_dims: int, dims: dict[str, int]) -> DTensorPlacements:
        """As `placements`, but partial along axes that shard a dimension the tensor lacks."""
        placements = self.placements(num_dims, dims)
        return tuple(
            Partial() if name is not None and name not in dims else each
            for name, each in zip(self.placement, placements)
        )

    def to_local(self, x: Tensor, **dims: int) -> Tensor:
        """This rank's shard of an input, as a plain tensor.

        Ranks that shard a dimension which the input lacks use the same input, so that its gradient
        is partial on them: backward reduces it.
        """
        wanted = self.placements(x.ndim, dims)
        gradient = self.partial_placements(x.ndim, dims)
        if not isinstance(x, DTensor) and _all_replicated(gradient):
            return x
        shared = self.shared.redistribute(x, self.mesh, wanted)
        local: Tensor = shared.to_local(grad_placements=gradient)
        return local

    def reduce_partial(self, y: Tensor, **dims: int) -> Tensor:
        """Reduce a local result over the ranks that shard a dimension which it lacks."""
        partial, wanted = self.partial_placements(y.ndim, dims), self.placements(y.ndim, dims)
        if partial == wanted:
            return y
        dtensor = _as_dtensor(y, self.mesh, partial)
        local: Tensor = dtensor.redistribute(self.mesh, wanted).to_local()
        return local

    def to_global(self, y: Tensor, **dims: int) -> Tensor:
        """A local result as a DTensor, or as it is if every rank holds all of it."""
        placements = self.placements(y.ndim, dims)
        return y if _all_replicated(placements) else _as_dtensor(y, self.mesh, placements)

    def restricted_to(self, name: str) -> OperatorSharding:
        """The same with only the axes that shard dimension `name`."""
        return replace(
            self, placement=tuple(each if each == name else None for each in self.placement)
        )


def redistribute_between(
    y: Tensor,
    source: OperatorSharding,
    dims: dict[str, int],
    target: OperatorSharding,
    wanted: dict[str, int],
) -> Tensor:
    """Redistribute a local result of operator `source` to a local input of operator `target`."""
    dtensor = _as_dtensor(y, source.mesh, source.placements(y.ndim, dims))
    wanted_placements = target.placements(y.ndim, wanted)
    local: Tensor = dtensor.redistribute(source.mesh, wanted_placements).to_local()
    return local


def _as_dtensor(local: Tensor, mesh: DeviceMesh, placements: DTensorPlacements) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _all_replicated(placements: Iterable[DTensorPlacement]) -> bool:
    return all(isinstance(placement, Replicate) for placement in placements)


def replicated(x: Any) -> Any:
    """A DTensor as a plain tensor that every rank holds (all-gathered); anything else as it is."""
    return (
        x.redistribute(placements=(Replicate(),) * x.device_mesh.ndim).to_local()
        if isinstance(x, DTensor)
        else x
    )
