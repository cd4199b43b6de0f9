"""Where ranks stand: strides of mesh axes, stages and nodes, as the plan's placement orders the
axes.

`placement` names the axes innermost first: ranks that differ by 1 are neighbors on the first axis,
as in Megatron-LM's `tp-cp-ep-dp-pp` order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import AXES
from workbench.plan.stage_replicas import overlaps, plan_stage_tokens

TrafficReach = Literal["node", "network", "racks"]
"""How far an axis goes: over a node's own links, between nodes, between racks."""


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


def stage_of(plan: ResolvedPlan, rank: int) -> int:
    """The pipeline rank of global rank `rank`."""
    return first_ranks_of_stages(plan).index(representative_ranks(plan)[rank])


def representative_ranks(plan: ResolvedPlan) -> dict[int, int]:
    """Rank -> the first rank of its pipeline stage, which does the same work; where replicas of a
    stage share a microbatch unevenly, the first has the most of it.
    """
    if plan.strategy.pipeline.replicas:
        starts = first_ranks_of_stages(plan)
        return {rank: starts[bisect_right(starts, rank) - 1] for rank in range(plan.world_size)}
    stride, stages = _pipeline_stride(plan), plan.sizes["pipeline"]
    return {rank: rank // stride % stages * stride for rank in range(plan.world_size)}


def equal_ranks(plan: ResolvedPlan) -> dict[int, int]:
    """Rank -> the first rank that makes the same calls: `representative_ranks`, but for stages with
    replicas of their own, of which those are alike that exchange as many tokens with as many
    peers.
    """
    if not plan.strategy.pipeline.replicas:
        return representative_ranks(plan)
    first: dict[object, int] = {}
    return {rank: first.setdefault(work, rank) for rank, work in enumerate(_replica_work(plan))}


def _replica_work(plan: ResolvedPlan) -> Iterator[tuple[object, ...]]:
    """What each rank in turn does: its stage, its tokens of a microbatch, and how many of them
    it shares with each replica of the stages beside.
    """
    parts, split = plan_stage_tokens(plan), plan.strategy.tensor.sequence
    for stage, replicas in enumerate(plan.strategy.pipeline.replicas or []):
        beside = [parts[i] for i in (stage - 1, stage + 1) if 0 <= i < len(parts)]
        sizes = plan.sizes | {"data": replicas}
        strides = axis_strides(plan.strategy.placement, sizes)
        for rank in range(strides["pipeline"]):
            at = {axis: rank // strides[axis] % sizes[axis] for axis in ("tensor", "data")}
            place = at["data"] * sizes["tensor"] + at["tensor"] if split else at["data"]
            own = parts[stage][place]
            shared = tuple(tuple(b - a for _, (a, b) in overlaps(own, x)) for x in beside)
            yield stage, own[1] - own[0], shared


def _pipeline_stride(plan: ResolvedPlan) -> int:
    return int(axis_strides(plan.strategy.placement, plan.sizes)["pipeline"])
