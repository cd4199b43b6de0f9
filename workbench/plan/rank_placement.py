"""Where ranks stand: strides of mesh axes, stages and nodes, as the plan's placement orders the
axes.

`placement` names the axes innermost first: ranks that differ by 1 are neighbors on the first axis,
as in Megatron-LM's `tp-cp-ep-dp-pp` order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import schedule_table
from workbench.plan.schema import AXES
from workbench.plan.stage_replicas import overlaps, own_part, plan_stage_tokens
from workbench.runtime_facts.bucket_packing import shard_parts

TrafficReach = Literal["node", "network", "racks"]
"""How far an axis goes: over a node's own links, between nodes, between racks."""


class RankPlace(NamedTuple):
    """A rank's index along the axes that decide its work.

    Attributes:
        stage: Pipeline rank.
        replica: Data-parallel rank; where stages have replicas of their own, among those of its
            stage.
        tensor: Tensor-parallel rank.
        holder: Among the ranks that hold the same parameters, over which ZeRO shards them: those of
            data x context.
    """

    stage: int
    replica: int = 0
    tensor: int = 0
    holder: int = 0


def axis_strides(placement: Sequence[str], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Distance in ranks between neighbors along each mesh axis.

    Args:
        placement: Axes of the mesh, innermost first.
        sizes: Axis -> number of ranks, floats or arrays.

    Returns:
        Axis -> stride in ranks, in the order of `plan.schema.AXES`.
    """
    result: dict[str, Any] = {}
    stride: Any = 1
    for axis in placement:
        result[axis] = stride
        stride = stride * sizes[axis]
    return {axis: result[axis] for axis in AXES if axis in result}


def axis_reach(span: float, gpus_per_node: int, rack_nodes: int | None) -> TrafficReach:
    """How far a group goes whose first and last rank are `span` ranks apart, ends included."""
    if span <= gpus_per_node:
        return "node"
    return "racks" if rack_nodes and span > gpus_per_node * rack_nodes else "network"


def leaves_node(plan: ResolvedPlan, axis: str) -> bool:
    """Whether groups of `axis` leave a node; experts lie on neighbors of data x context."""
    strides, node = axis_strides(plan.strategy.placement, plan.sizes), plan.cluster.gpus_per_node
    if axis == "expert":
        replicas = [strides[name] for name in ("data", "context") if plan.sizes[name] > 1]
        expert, tensor = plan.strategy.expert, plan.strategy.tensor.ranks
        over_tensor = tensor // (expert.tensor or tensor)
        return expert.size * min(replicas, default=tensor) // over_tensor > (node or 1)
    return plan.sizes[axis] > 1 and strides[axis] * plan.sizes[axis] > (node or 1)


def first_ranks_of_stages(plan: ResolvedPlan) -> list[int]:
    """The first rank of each pipeline stage."""
    if replicas := plan.strategy.pipeline.replicas:
        each = plan.sizes["tensor"] * plan.sizes["context"]
        return [each * sum(replicas[:stage]) for stage in range(len(replicas))]
    return [stage * _pipeline_stride(plan) for stage in range(plan.sizes["pipeline"])]


def table_row(place: RankPlace, replicas: Sequence[int], in_turn: bool) -> int:
    """The row of the schedule's table that a rank's actions are in: its stage's, or its own where
    replicas of a stage take microbatches in turn.
    """
    return sum(replicas[: place.stage]) + place.replica if in_turn else place.stage


def rank_place(plan: ResolvedPlan, rank: int) -> RankPlace:
    """Where global rank `rank` stands on the mesh, or on that of its stage where stages have
    replicas of their own.
    """
    sizes = plan.sizes
    stage = 0
    if replicas := plan.strategy.pipeline.replicas:
        starts = first_ranks_of_stages(plan)
        stage = bisect_right(starts, rank) - 1
        rank, sizes = rank - starts[stage], sizes | {"data": replicas[stage]}
    strides = axis_strides(plan.strategy.placement, sizes)
    at = {axis: rank // strides[axis] % sizes[axis] for axis in AXES}
    inner, outer = (axis for axis in plan.strategy.placement if axis in ("context", "data"))
    holder = at[inner] + sizes[inner] * at[outer]
    return RankPlace(stage if replicas else at["pipeline"], at["data"], at["tensor"], holder)


def representative_ranks(plan: ResolvedPlan) -> dict[int, int]:
    """Rank -> the first rank that makes the same calls: the first of its pipeline stage. Of stages
    with replicas of their own, those are alike that exchange as many tokens with as many peers, or
    take as many microbatches in the same order.
    """
    if not plan.strategy.pipeline.replicas:
        stride, stages = _pipeline_stride(plan), plan.sizes["pipeline"]
        return {rank: rank // stride % stages * stride for rank in range(plan.world_size)}
    own = _turns_of(plan) if plan.strategy.pipeline.is_round_robin else _share_of(plan)
    work = lru_cache(maxsize=None)(lambda place: (place.stage, own(place), _tied_work(plan, place)))
    first: dict[object, int] = {}
    return {
        rank: first.setdefault(work(rank_place(plan, rank)), rank)
        for rank in range(plan.world_size)
    }


def first_ranks_of_replicas(plan: ResolvedPlan) -> list[int]:
    """The first rank of each replica of each stage, in the order of both."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(plan.world_size):
        first.setdefault(rank_place(plan, rank)[:2], rank)
    return [first[key] for key in sorted(first)]


def _turns_of(plan: ResolvedPlan) -> Callable[[RankPlace], object]:
    """What a rank does whose stage's replicas take microbatches in turn: the order of its actions,
    whatever their microbatches.
    """
    table = schedule_table(plan)
    kinds = [tuple(action.kind for action in row) for row in table.rows]
    return lambda place: kinds[table.placement[place.stage] + place.replica]


def _share_of(plan: ResolvedPlan) -> Callable[[RankPlace], object]:
    """What a rank does whose stage's replicas share every microbatch: its tokens of one, and how
    many of them it shares with each replica of the stages beside.
    """
    parts, replicas = plan_stage_tokens(plan), plan.strategy.pipeline.replicas or []

    def share(place: RankPlace) -> object:
        own = own_part(parts, replicas, place.stage, place.replica, place.tensor)
        beside = [parts[i] for i in (place.stage - 1, place.stage + 1) if 0 <= i < len(parts)]
        return own[1] - own[0], *(tuple(b - a for _, (a, b) in overlaps(own, x)) for x in beside)

    return share


def _tied_work(plan: ResolvedPlan, place: RankPlace) -> tuple[int, ...]:
    """What a rank exchanges of a tied weight's gradient with the other end of the pipeline: how
    often it sends all of it, or how many elements its shard shares with each there.
    """
    replicas = plan.strategy.pipeline.replicas or []
    if plan.profiled:
        own, peers = replicas[place.stage], tied_stages_of_profile(plan, place.stage)
        return tuple(len(range(place.holder, replicas[stage], own)) for stage, _ in peers)
    ends = {0: (replicas[0], replicas[-1]), len(replicas) - 1: (replicas[-1], replicas[0])}
    if not plan.ties_weights or place.stage not in ends:
        return ()
    own, other = (count * plan.sizes["context"] for count in ends[place.stage])
    if not plan.strategy.data.zero:
        return (len(range(place.holder, other, own)),)
    table = -(-plan.shape.vocab // plan.sizes["tensor"]) * plan.shape.hidden
    shards, others = shard_parts(table, own), shard_parts(table, other)
    return tuple(b - a for _, (a, b) in overlaps(shards[place.holder], others))


def tied_stages_of_profile(plan: ResolvedPlan, stage: int) -> list[tuple[int, float]]:
    """(stage, bytes) of each stage with which `stage` of a layer profile has parameters in common,
    of which both hold a copy.
    """
    starts = [0, *accumulate(plan.strategy.pipeline.partition[:-1])]
    pairs = plan.layer_profile.tied_stages(starts).items()
    return [(sum(pair) - stage, size) for pair, size in pairs if stage in pair]


def _pipeline_stride(plan: ResolvedPlan) -> int:
    return int(axis_strides(plan.strategy.placement, plan.sizes)["pipeline"])
