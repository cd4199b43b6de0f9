"""The mesh: where this rank stands on every axis, and whom it talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from workbench.plan.placement import coordinates, rank_at


@dataclass(frozen=True)
class MeshAxis:
    """One axis as this rank sees it. `ranks[i]` is the global rank at index i; `group` is None when size is 1."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank."""

    rank: int
    world_size: int
    axes: Mapping[str, MeshAxis]

    def __getitem__(self, name: str) -> MeshAxis:
        return self.axes[name]

    def coordinate(self) -> dict[str, int]:
        """Index on every axis."""
        return {name: axis.index for name, axis in self.axes.items()}


def build_mesh(sizes: Mapping[str, int], placement: Sequence[str], rank: int, device_type: str) -> Mesh:
    """The mesh of `rank`; the default process group must exist when more than one rank takes part.

    `placement` names the axes innermost first. Groups are made only for axes longer than 1.
    """
    where = coordinates(rank, sizes, placement)
    long = [name for name in reversed(placement) if sizes[name] > 1]
    groups: dict[str, dist.ProcessGroup] = {}
    if long:
        device_mesh = init_device_mesh(device_type, tuple(sizes[name] for name in long), mesh_dim_names=tuple(long))
        groups = {name: device_mesh.get_group(name) for name in long}
    axes = {name: _axis(name, where, sizes, placement, groups.get(name)) for name in placement}
    world = 1
    for name in placement:
        world *= sizes[name]
    return Mesh(rank, world, axes)


def _axis(
    name: str,
    where: dict[str, int],
    sizes: Mapping[str, int],
    placement: Sequence[str],
    group: dist.ProcessGroup | None,
) -> MeshAxis:
    ranks = tuple(rank_at({**where, name: i}, sizes, placement) for i in range(sizes[name]))
    return MeshAxis(name, sizes[name], where[name], ranks, group)
