"""The device mesh: this rank's index and process group on every axis of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from workbench.plan.operators.redistribution_moves import neighbors
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import sides as operator_sides
from workbench.plan.schedule_table import pair_groups, transfer_pairs
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import Part, plan_stage_tokens

GRID_AXES = ("tensor.0", "tensor.1", "tensor.2")
"""Axes of a tensor grid, innermost first."""
TIED_AXIS = "tied"
CPU = torch.device("cpu")
GRADIENT_GROUP_SUFFIX = " gradients"
"""Suffix of axes whose process groups only all-reduce gradients. They are separate from the axis'
own group, so that neither's collectives wait for the other's.
"""


@dataclass(frozen=True)
class StageReplica:
    """A rank of a replica of a pipeline stage.

    Attributes:
        rank: Global.
        tokens: Its part of the tokens of every microbatch, [B, T] in memory order.
    """

    rank: int
    tokens: Part


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
    replicas: tuple[tuple[StageReplica, ...], ...] = ()
    """Of the pipeline axis, where replicas of a stage share each microbatch: those at each index.
    `ranks` then has the first of each, and this rank at its own index.
    """

    @property
    def own_replica(self) -> StageReplica:
        """This rank's place among `replicas`."""
        rank = self.ranks[self.index]
        return next(one for one in self.replicas[self.index] if one.rank == rank)

    def ranks_at(self, index: int) -> tuple[int, ...]:
        """The global ranks at an index: one, but for `replicas`."""
        if not self.replicas:
            return (self.ranks[index],)
        return tuple(replica.rank for replica in self.replicas[index])


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
    - `tied`, where stages have replicas of their own: `replicas` of the first stage, then those of
      the last, which both hold a tied weight.
    - `tensor.0` to `tensor.2`: axes of a tensor grid.
    - `tensor gradients`, and one for each grid axis: where tensor ranks see different tokens and
      sum gradients.
    - `operators.0`, the outermost, and so on: axes of the grid that tensor ranks are to operator
      strategies; `operators.0-1` spans two neighboring ones; `operators` is the same as a
      DeviceMesh.
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
    every = _axes(plan)
    for name, (members, reported) in every.items():
        mine = next(row for row in members if rank in row)
        key = (reported, str(members))
        if max(map(len, members)) > 1 and key not in groups:
            joining(f"the {name} group of {_ranks(mine)}")
            made, _ = dist.new_subgroups_by_enumeration(members, timeout=deadline, group_desc=name)
            assert made is not None
            _connect(made, device)
            groups[key] = made
        group = groups.get(key) if len(mine) > 1 else None
        axes[name] = MeshAxis(name, len(mine), mine.index(rank), tuple(mine), group, reported)
    axes["pipeline"] = _by_stage(axes["pipeline"], plan)
    if axes["pipeline"].size > 1:
        axes["pipeline"] = _connect_pairs(
            plan, axes["pipeline"], every["pipeline"][0], joining, device
        )
    operators = _device_mesh([axes[name] for name in _operators(plan)], axes["tensor"], device)
    return Mesh(rank, plan.world_size, axes, operators)


def every_mesh(plan: ResolvedPlan) -> list[dict[str, tuple[int, ...]]]:
    """Of every rank: axis of its mesh -> global ranks along it, without process groups."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(plan.world_size)]
    for name, (groups, _) in _axes(plan).items():
        for group in map(tuple, groups):
            for rank in group:
                found[rank][name] = group
    return found


def _ranks(members: Sequence[int]) -> str:
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


def _by_stage(axis: MeshAxis, plan: ResolvedPlan) -> MeshAxis:
    """The pipeline axis, of one place a stage where its replicas share each microbatch; those that
    take microbatches in turn have a place each.
    """
    sizes = plan.strategy.pipeline.replicas
    if not sizes or plan.strategy.pipeline.is_round_robin:
        return axis
    tokens = plan_stage_tokens(plan)
    replicas = tuple(
        tuple(StageReplica(rank, part) for rank, part in zip(ranks, parts))
        for ranks, parts in zip(_split(axis.ranks, [*map(len, tokens)]), tokens)
    )
    rank = axis.ranks[axis.index]
    by_stage = [[replica.rank for replica in stage] for stage in replicas]
    index = next(i for i, ranks in enumerate(by_stage) if rank in ranks)
    first = tuple(rank if i == index else ranks[0] for i, ranks in enumerate(by_stage))
    return replace(axis, size=len(sizes), index=index, ranks=first, replicas=replicas)


def _split(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive parts of these sizes."""
    ends = list(accumulate(sizes))
    return tuple(tuple(ranks[end - size : end]) for size, end in zip(sizes, ends))


def _connect_pairs(
    plan: ResolvedPlan,
    axis: MeshAxis,
    pipelines: list[list[int]],
    joining: Callable[[str], None],
    device: torch.device,
) -> MeshAxis:
    """Connect every two pipeline ranks that send to each other, both ways; the axis with the
    process groups of those pairs that have their own. Where replicas of a stage share each
    microbatch, a pair is all replicas of two stages.

    NCCL connects two ranks at their first transfer, and blocks both hosts until both are there: in
    the first step one would wait for the other's whole forward.
    """
    deadline = timedelta(seconds=plan.telemetry.timeout_seconds)
    sizes = [len(axis.ranks_at(index)) for index in range(axis.size)]
    groups: dict[int, dist.ProcessGroup] = {}
    for pair in transfer_pairs(plan):
        if axis.index in pair:
            both = [rank for index in pair for rank in axis.ranks_at(index)]
            joining(f"the pipeline transfers of {_ranks(both)}")
        if pair_groups(plan):
            made, _ = dist.new_subgroups_by_enumeration(
                [_at(pair, _split(ranks, sizes)) for ranks in pipelines],
                timeout=deadline,
                group_desc="pipeline transfers",
            )
            if made is not None:
                _connect(made, device)
                groups[pair[axis.index == pair[0]]] = made
        if axis.index in pair:
            peer = pair[axis.index == pair[0]]
            for rank in axis.ranks_at(peer):
                sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
                exchange(sent, received, rank, groups.get(peer, axis.group))
    return replace(axis, pair_groups=groups)


def _at(pair: tuple[int, int], by_stage: Sequence[Sequence[int]]) -> list[int]:
    """The ranks at two places of a pipeline."""
    return [rank for index in pair for rank in by_stage[index]]


def exchange(x: Tensor, into: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send `x` to global rank `peer` and receive `into` from it, which calls this too; returns when
    both are over.
    """
    ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, into, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _operators(plan: Plan) -> dict[str, int]:
    """The grid that tensor ranks are to operator strategies: axis -> size, outermost first."""
    return {operator_axis([i]): size for i, size in enumerate(operator_sides(plan))}


def operator_axis(run: Sequence[int]) -> str:
    """Name of the axis that spans neighboring axes of the grid of operator strategies."""
    return "operators." + "-".join(map(str, run))


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


def _axes(plan: ResolvedPlan) -> dict[str, tuple[list[list[int]], str]]:
    """Axis -> (its groups of ranks, the plan's axis that it is reported under).

    Where stages have replicas of their own, each stage is a mesh, one after the other, and a group
    of the pipeline axis has the replicas of all stages.
    """
    replicas = plan.strategy.pipeline.replicas
    if not replicas:
        found = _block_axes(plan, plan.sizes, 0)
        return {name: (groups.tolist(), reported) for name, (groups, reported) in found.items()}
    each = plan.sizes["tensor"] * plan.sizes["context"]
    blocks = [
        _block_axes(plan, plan.sizes | {"data": size, "pipeline": 1}, each * sum(replicas[:stage]))
        for stage, size in enumerate(replicas)
    ]
    merged = {
        name: ([group for block in blocks for group in block[name][0].tolist()], reported)
        for name, (_, reported) in blocks[0].items()
    }
    merged["pipeline"] = (_joined(blocks, "pipeline"), "pipeline")
    if plan.shape.tied and len(blocks) > 1:
        between = [
            [rank] for block in blocks[1:-1] for rank in block["tensor"][0].flatten().tolist()
        ]
        ends = _joined([blocks[0], blocks[-1]], "replicas")
        merged[TIED_AXIS] = ([*ends, *between], "pipeline")
    return merged


def _joined(blocks: Sequence[dict[str, tuple[Tensor, str]]], name: str) -> list[list[int]]:
    """Groups of an axis, each with those of the same number of all `blocks`."""
    each = zip(*(block[name][0].tolist() for block in blocks))
    return [list(chain.from_iterable(groups)) for groups in each]


def _block_axes(
    plan: ResolvedPlan, sizes: dict[str, int], first: int
) -> dict[str, tuple[Tensor, str]]:
    """Axis -> (its groups of ranks [groups, size], the plan's axis that it is reported under), of
    the mesh of these sizes that starts at rank `first`.

    Where stages have replicas of their own, a group of the pipeline axis has the ranks of a stage
    that share a microbatch, or take microbatches in turn.
    """
    s = plan.strategy
    sizes = {**sizes}
    world = math.prod(sizes.values())
    grid = s.tensor.size if isinstance(s.tensor.size, list) else []
    sub_axes = dict(zip(GRID_AXES, grid)) or dict(reversed(_operators(plan).items()))
    grid_axes, sizes = tuple(sub_axes), sizes | sub_axes
    order = [
        part
        for name in s.placement
        for part in (grid_axes if name == "tensor" and grid_axes else (name,))
    ]
    ranks = torch.arange(first, first + world).view([sizes[name] for name in reversed(order)])

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
    found = {name: (along(name), name) for name in ("context", "data")}
    shards = s.tensor.sequence and not s.pipeline.is_round_robin
    split = ("tensor", "data") if shards else ("data",)
    found["pipeline"] = (along(*(split if s.pipeline.replicas else ("pipeline",))), "pipeline")
    ulysses = s.context.num_ulysses_ranks
    found |= {
        "context.ring": (_strided(found["context"][0], ulysses), "context"),
        "context.ulysses": (_neighbours(found["context"][0], ulysses), "context"),
    }
    found["tensor"] = (along(*(grid_axes or ("tensor",))), "tensor")
    found |= {name: (along(name), "tensor") for name in grid_axes} | gradient_axes
    for run in neighbors(range(len(_operators(plan)))):
        names = [operator_axis([axis]) for axis in reversed(run)]
        found[operator_axis(run)] = (along(*names), "tensor")
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
