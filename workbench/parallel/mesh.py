"""The mesh: where this rank stands on every axis, and whom it talks to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.operator_rules import sides as operator_sides
from workbench.plan.schema import Plan

GRID_AXES = ("tensor.0", "tensor.1", "tensor.2")
"""Sides of a tensor grid, innermost first."""
CPU = torch.device("cpu")
GRADIENT_GROUP_SUFFIX = " gradients"
"""Ends the names of axes whose groups only sum gradients: beside the axis' own, so that neither
waits for the other.
"""


@dataclass(frozen=True)
class MeshAxis:
    """One axis as this rank sees it. `ranks[i]` is the global rank at index i; `group` is None when
    size is 1.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    reported: str = ""
    """The axis of the plan that its traffic is counted under."""


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank.

    Those of the plan (tensor, context, data, pipeline), and those made of them:
    - `replicas`, data x context: ranks that hold the same parameters, and sum their gradients;
    - its parts `shard` (neighbours, over which ZeRO shards) and `replicate` (what is left: hybrid
      sharding);
    - its parts `expert` (neighbours, which share out the experts) and `expert_replicas` (which hold
      the same ones), of which again `expert_shard` and `expert_replicate`;
    - the sides of a tensor grid, `tensor.0` to `tensor.2`;
    - `tensor gradients`, and one of each side, where tensor ranks that meet different tokens sum
      gradients.
    - the sides of the grid that tensor ranks are to operator strategies, `operators.0` the
      outermost; `operators` is the same as a DeviceMesh.
    """

    rank: int
    world_size: int
    axes: Mapping[str, MeshAxis]
    operators: DeviceMesh | None = None

    def __getitem__(self, name: str) -> MeshAxis:
        return self.axes[name]

    def coordinate(self) -> dict[str, int]:
        """Index on every axis of the plan."""
        return {name: axis.index for name, axis in self.axes.items() if axis.reported == name}


def build_mesh(plan: ResolvedPlan, rank: int, device: torch.device = CPU) -> Mesh:
    """The mesh of `rank` in a complete plan; the default process group must exist when more than
    one rank takes part.

    Every rank must call it, with the same plan. Groups are made only for axes longer than 1, with
    the plan's deadline, and used once for tensors on `device`; two axes of the same ranks that are
    counted alike share one.
    """
    deadline = timedelta(seconds=plan.telemetry.timeout_seconds)
    groups: dict[tuple[str, str], dist.ProcessGroup] = {}
    axes: dict[str, MeshAxis] = {}
    for name, (members, reported) in _axes(plan).items():
        size, mine = members.shape[1], next(row for row in members.tolist() if rank in row)
        key = (reported, str(members.tolist()))
        if size > 1 and key not in groups:
            made, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=deadline)
            assert made is not None
            _connect(made, device)
            groups[key] = made
        axes[name] = MeshAxis(name, size, mine.index(rank), tuple(mine), groups.get(key), reported)
    operators = _device_mesh([axes[name] for name in _operators(plan)], axes["tensor"], device)
    return Mesh(rank, plan.world_size, axes, operators)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Use `group` once, by all of its ranks.

    NCCL makes its communicator at the first call, which all ranks of the group must make: a first
    call between two of them, such as the exchange of a tied weight on a grid, waits for ever for
    the others.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _operators(plan: Plan) -> dict[str, int]:
    """The grid that tensor ranks are to operator strategies: axis -> size, outermost first."""
    return {f"operators.{i}": size for i, size in enumerate(operator_sides(plan))}


def _device_mesh(axes: list[MeshAxis], tensor: MeshAxis, device: torch.device) -> DeviceMesh | None:
    """The grid as DTensor knows it, over the groups that there are; None without one."""
    groups = [axis.group for axis in axes if axis.group is not None]
    if not groups:
        return None
    ranks, names = (
        torch.tensor(tensor.ranks).view([axis.size for axis in axes]),
        tuple(axis.name for axis in axes),
    )
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        device.type,
        None if len(groups) == 1 else ranks,
        mesh_dim_names=names,
    )


def _axes(plan: ResolvedPlan) -> dict[str, tuple[Tensor, str]]:
    """Axis -> (its groups of ranks [groups, size], the plan's axis that it is counted under)."""
    s = plan.strategy
    sizes = {**plan.sizes}
    grid = s.tensor.size if isinstance(s.tensor.size, list) else []
    parts = dict(zip(GRID_AXES, grid)) or dict(reversed(_operators(plan).items()))
    sides, sizes = tuple(parts), sizes | parts
    order = [
        part for name in s.placement for part in (sides if name == "tensor" and sides else (name,))
    ]
    ranks = torch.arange(plan.world_size).view([sizes[name] for name in reversed(order)])

    def along(*names: str) -> Tensor:
        """Groups of the ranks that differ on `names` alone, those named first varying fastest."""
        dims = [len(order) - 1 - order.index(name) for name in reversed(names)]
        return ranks.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2)

    summed = GRID_AXES[: len(grid)] or (("tensor",) if s.tensor.sequence and not sides else ())
    twins = {
        name + GRADIENT_GROUP_SUFFIX: (along(name), "tensor" + GRADIENT_GROUP_SUFFIX)
        for name in summed
    }
    replicas = along(*(name for name in order if name in ("context", "data")))
    shard = replicas.shape[1] if s.data.shard == "all" else s.data.shard
    expert = s.expert.size
    beside = _apart(replicas, expert)
    found = {name: (along(name), name) for name in ("context", "data", "pipeline")}
    found["tensor"] = (along(*(sides or ("tensor",))), "tensor")
    found |= {side: (along(side), "tensor") for side in sides} | twins
    found |= {"replicas": (replicas, "data"), "shard": (_together(replicas, shard), "data")}
    found |= {
        "replicate": (_apart(replicas, shard), "data"),
        "expert": (_together(replicas, expert), "expert"),
    }
    inner = max(1, shard // expert)
    found |= {
        "expert_replicas": (beside, "data"),
        "expert_shard": (_together(beside, inner), "data"),
    }
    return found | {"expert_replicate": (_apart(beside, inner), "data")}


def _together(groups: Tensor, size: int) -> Tensor:
    """Each group cut into groups of `size` neighbours."""
    return groups.reshape(-1, size)


def _apart(groups: Tensor, size: int) -> Tensor:
    """Each group cut into those that stand at the same place of `size` neighbours."""
    return groups.view(len(groups), -1, size).transpose(1, 2).reshape(len(groups) * size, -1)
