"""The device mesh: this rank's index and process group on every axis of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from workbench.plan.custom_schedule import pair_groups, transfer_pairs
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.operator_rules import sides as operator_sides
from workbench.plan.schema import Plan

GRID_AXES = ("tensor.0", "tensor.1", "tensor.2")
"""Axes of a tensor grid, innermost first."""
CPU = torch.device("cpu")
GRADIENT_GROUP_SUFFIX = " gradients"
"""Suffix of axes whose process groups only all-reduce gradients. They are separate from the axis'
own group, so that neither's collectives wait for the other's.
"""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh, as this rank sees it.

    Attributes:
        index: This rank's.
        ranks: The global rank at each index.
        group: None when size is 1.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    reported: str = ""
    """The axis of the plan that its collectives are reported under."""
    pair_groups: Mapping[int, dist.ProcessGroup] = field(default_factory=dict, compare=False)
    """Index of a peer -> the process group of the two; where none is given, they use `group`."""


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank: those of the plan (tensor, context, data, pipeline), and derived ones.

    - `replicas`, data x context: ranks that hold the same parameters, and sum their gradients.
    - `shard` and `replicate`: sub-axes of `replicas`, over which ZeRO shards and repeats (hybrid
      sharding). Ranks of a shard group are neighbours.
    - `expert` and `expert_replicas`: sub-axes of `replicas`, over which experts are sharded and
      repeated; `expert_shard` and `expert_replicate` are ZeRO's sub-axes of the latter.
    - `context.ring` and `context.ulysses`: sub-axes of `context`, around which keys and values are
      sent, and between whose neighbours heads are exchanged for tokens.
    - `tensor.0` to `tensor.2`: axes of a tensor grid.
    - `tensor gradients`, and one for each grid axis: where tensor ranks see different tokens and
      sum gradients.
    - `operators.0`, the outermost, and so on: axes of the grid that tensor ranks are to operator
      strategies; `operators` is the same as a DeviceMesh.
    """

    rank: int
    world_size: int
    axes: Mapping[str, MeshAxis]
    operators: DeviceMesh | None = None

    def __getitem__(self, name: str) -> MeshAxis:
        return self.axes[name]

    @property
    def operator_axes(self) -> tuple[str, ...]:
        """The axes of the grid of operator strategies, outermost first; none without."""
        return tuple(f"operators.{i}" for i in range(self.operators.ndim if self.operators else 0))

    def coordinate(self) -> dict[str, int]:
        """This rank's index on every axis of the plan."""
        return {name: axis.index for name, axis in self.axes.items() if axis.reported == name}


def build_mesh(
    plan: ResolvedPlan,
    rank: int,
    device: torch.device = CPU,
    joining: Callable[[str], None] = lambda group: None,
) -> Mesh:
    """Build the mesh of `rank`; every rank must call it, with the same plan.

    Groups are created only for axes longer than 1, with the plan's timeout, and used once. Two axes
    with the same ranks that are reported alike share one.

    Args:
        plan: Resolved.
        rank: Global rank; the default process group must exist if there are several.
        device: Of the tensors that collectives will be given.
        joining: Called with each group, in words, before its ranks connect.
    """
    deadline = timedelta(seconds=plan.telemetry.timeout_seconds)
    groups: dict[tuple[str, str], dist.ProcessGroup] = {}
    axes: dict[str, MeshAxis] = {}
    for name, (members, reported) in _axes(plan).items():
        size, mine = members.shape[1], next(row for row in members.tolist() if rank in row)
        key = (reported, str(members.tolist()))
        if size > 1 and key not in groups:
            joining(f"the {name} group of {_ranks(mine)}")
            made, _ = dist.new_subgroups_by_enumeration(
                members.tolist(), timeout=deadline, group_desc=name
            )
            assert made is not None
            _connect(made, device)
            groups[key] = made
        axes[name] = MeshAxis(name, size, mine.index(rank), tuple(mine), groups.get(key), reported)
    if axes["pipeline"].size > 1:
        pipelines = _axes(plan)["pipeline"][0].tolist()
        axes["pipeline"] = _connect_pairs(plan, axes["pipeline"], pipelines, device, joining)
    operators = _device_mesh([axes[name] for name in _operators(plan)], axes["tensor"], device)
    return Mesh(rank, plan.world_size, axes, operators)


def mesh_ranks(plan: ResolvedPlan, rank: int) -> dict[str, tuple[int, ...]]:
    """Axis of the mesh of `rank` -> global ranks along it, without process groups."""
    return {
        name: tuple(next(row for row in members.tolist() if rank in row))
        for name, (members, _) in _axes(plan).items()
    }


def _ranks(members: list[int]) -> str:
    """Ranks of a group, in words: all of a few, the ends of more."""
    few = len(members) <= 8
    return "ranks " + (
        ", ".join(map(str, members)) if few else f"{members[0]} to {members[-1]} ({len(members)})"
    )


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run one collective on `group` with all of its ranks.

    NCCL creates its communicator at the first call, which needs all ranks of the group: a first
    call between two of them, such as the exchange of a tied weight on a grid, would hang.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _connect_pairs(
    plan: ResolvedPlan,
    axis: MeshAxis,
    pipelines: list[list[int]],
    device: torch.device,
    joining: Callable[[str], None],
) -> MeshAxis:
    """Connect every two pipeline ranks that send to each other, both ways; the axis with the
    process groups of those pairs that have their own.

    NCCL connects two ranks at their first transfer, and blocks both hosts until both are there: in
    the first step one would wait for the other's whole forward.
    """
    deadline = timedelta(seconds=plan.telemetry.timeout_seconds)
    groups: dict[int, dist.ProcessGroup] = {}
    for pair in transfer_pairs(plan):
        if axis.index in pair:
            joining(f"the pipeline transfers of {_ranks([axis.ranks[index] for index in pair])}")
        if pair_groups(plan):
            members = [[ranks[index] for index in pair] for ranks in pipelines]
            made, _ = dist.new_subgroups_by_enumeration(
                members, timeout=deadline, group_desc="pipeline transfers"
            )
            if made is not None:
                _connect(made, device)
                groups[pair[axis.index == pair[0]]] = made
        if axis.index in pair:
            peer = pair[axis.index == pair[0]]
            sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
            exchange(sent, received, axis.ranks[peer], groups.get(peer, axis.group))
    return replace(axis, pair_groups=groups)


def exchange(x: Tensor, into: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send `x` to global rank `peer` and receive `into` from it, which calls this too; returns when
    both are over.
    """
    ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, into, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _operators(plan: Plan) -> dict[str, int]:
    """The grid that tensor ranks are to operator strategies: axis -> size, outermost first."""
    return {f"operators.{i}": size for i, size in enumerate(operator_sides(plan))}


def _device_mesh(axes: list[MeshAxis], tensor: MeshAxis, device: torch.device) -> DeviceMesh | None:
    """The operator grid as DTensor's DeviceMesh, over the existing groups; None without one."""
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
    """Axis -> (its groups of ranks [groups, size], the plan's axis that it is reported under)."""
    s = plan.strategy
    sizes = {**plan.sizes}
    grid = s.tensor.size if isinstance(s.tensor.size, list) else []
    sub_axes = dict(zip(GRID_AXES, grid)) or dict(reversed(_operators(plan).items()))
    grid_axes, sizes = tuple(sub_axes), sizes | sub_axes
    order = [
        part
        for name in s.placement
        for part in (grid_axes if name == "tensor" and grid_axes else (name,))
    ]
    ranks = torch.arange(plan.world_size).view([sizes[name] for name in reversed(order)])

    def along(*names: str) -> Tensor:
        """Groups of the ranks that differ on `names` only, the first named varying fastest."""
        dims = [len(order) - 1 - order.index(name) for name in reversed(names)]
        return ranks.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2)

    summed = GRID_AXES[: len(grid)] or (("tensor",) if s.tensor.sequence and not grid_axes else ())
    gradient_axes = {
        name + GRADIENT_GROUP_SUFFIX: (along(name), "tensor" + GRADIENT_GROUP_SUFFIX)
        for name in summed
    }
    replicas = along(*(name for name in order if name in ("context", "data")))
    shard = replicas.shape[1] if s.data.shard == "all" else s.data.shard
    expert = s.expert.size
    expert_replicas = _strided(replicas, expert)
    found = {name: (along(name), name) for name in ("context", "data", "pipeline")}
    ulysses = s.context.num_ulysses_ranks
    found |= {
        "context.ring": (_strided(found["context"][0], ulysses), "context"),
        "context.ulysses": (_neighbours(found["context"][0], ulysses), "context"),
    }
    found["tensor"] = (along(*(grid_axes or ("tensor",))), "tensor")
    found |= {name: (along(name), "tensor") for name in grid_axes} | gradient_axes
    found |= {"replicas": (replicas, "data"), "shard": (_neighbours(replicas, shard), "data")}
    found |= {
        "replicate": (_strided(replicas, shard), "data"),
        "expert": (_neighbours(replicas, expert), "expert"),
    }
    inner = max(1, shard // expert)
    found |= {
        "expert_replicas": (expert_replicas, "data"),
        "expert_shard": (_neighbours(expert_replicas, inner), "data"),
    }
    return found | {"expert_replicate": (_strided(expert_replicas, inner), "data")}


def _neighbours(groups: Tensor, size: int) -> Tensor:
    """Split each group into groups of `size` neighbours."""
    return groups.reshape(-1, size)


def _strided(groups: Tensor, size: int) -> Tensor:
    """Split each group into groups of the ranks at the same index of `size` neighbours."""
    return groups.view(len(groups), -1, size).transpose(1, 2).reshape(len(groups) * size, -1)
