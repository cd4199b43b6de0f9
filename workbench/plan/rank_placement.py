"""Where ranks stand: strides of mesh axes, stages and nodes, as the plan's placement orders the
axes.

`placement` names the axes innermost first: ranks that differ by 1 are neighbors on the first axis,
as in Megatron-LM's `tp-cp-ep-dp-pp` order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import AXES

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
    if replicas := _unequal_replicas(plan):
        each = plan.sizes["tensor"] * plan.sizes["context"]
        return [each * sum(replicas[:stage]) for stage in range(len(replicas))]
    return [stage * _pipeline_stride(plan) for stage in range(plan.sizes["pipeline"])]


def representative_ranks(plan: ResolvedPlan) -> dict[int, int]:
    """Rank -> the first rank of its pipeline stage, which does the same work."""
    if _unequal_replicas(plan):
        starts = first_ranks_of_stages(plan)
        return {rank: starts[bisect_right(starts, rank) - 1] for rank in range(plan.world_size)}
    stride, stages = _pipeline_stride(plan), plan.sizes["pipeline"]
    return {rank: rank // stride % stages * stride for rank in range(plan.world_size)}


def _pipeline_stride(plan: ResolvedPlan) -> int:
    return int(axis_strides(plan.strategy.placement, plan.sizes)["pipeline"])


def _unequal_replicas(plan: ResolvedPlan) -> list[int]:
    """Replicas of each stage where they differ; then stages stand one after the other."""
    replicas = plan.strategy.pipeline.replicas or []
    return replicas if len(set(replicas)) > 1 else []
