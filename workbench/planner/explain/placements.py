"""Where ranks stand in the tree of nodes, racks and the cluster: every order of a plan's axes, best
first, and shards of the optimizer's states within racks beside those across them.

PanGu-alpha (2104.12369, section 4) has operators split inside a server, a pipeline between servers,
and optimizer shards over the outermost level, where gradients hide behind compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from workbench.plan.rank_placement import axis_strides
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.axis_placement import (
    AxisPlacement,
    AxisTraffic,
    placement_of,
    rank_placements,
)
from workbench.planner.explain.asked_table import AskedTable
from workbench.planner.explain.plan_figures import ExplainedPlan, PlanFigures, plan_figures
from workbench.planner.plan_changes import Change
from workbench.units import bytes_text, duration_text, gib_text

MOST_SHOWN = 12
"""Rows above which only the first and the last half as many are shown; JSON has all."""


@dataclass(frozen=True)
class PlacedPlan:
    """A plan with another order of axes, or with shards within racks; estimated.

    Attributes:
        placement: Its order and the traffic of each axis.
        shard: Ranks of a group that shards states; all that hold the same parameters where None.
        changes: What `plan.replace` takes.
        figures: Its step and peak.
    """

    placement: AxisPlacement
    shard: int | None
    changes: Change
    figures: PlanFigures


def placement_table(subject: ExplainedPlan) -> AskedTable:
    """Every order of the axes that differs, the fastest first; where states are sharded and racks
    hold several of the ranks that shard them, also with groups that stay within a rack.
    """
    full = subject.resolved
    found = sorted(_placed(subject), key=lambda one: one.figures.seconds)
    best = found[0].figures.seconds
    axes = [axis for axis, size in full.sizes.items() if size > 1]
    shown = (
        found if len(found) <= MOST_SHOWN else found[: MOST_SHOWN // 2] + found[-MOST_SHOWN // 2 :]
    )
    left_out = [f"{len(found) - len(shown)} between are left out"] * (len(found) > len(shown))
    return AskedTable(
        "placements",
        "Placement: orders of the axes, best first (estimated)",
        ("innermost first", "states sharded", "step time", "× the best", "peak memory", *axes),
        [_cells(one, full, best, axes) for one in shown],
        [_tree(full), *left_out],
        [_json(one, full, best) for one in found],
        tuple(axes),
    )


def _placed(subject: ExplainedPlan) -> Iterator[PlacedPlan]:
    for one in rank_placements(subject.plan):
        order: Change = {**subject.pinned_fields, "strategy.placement": list(one.order)}
        yield _with(subject, order, None)
        if shard := shard_within_rack(subject.resolved, one.order):
            yield _with(subject, order | {"strategy.data.shard": shard}, shard)


def _with(subject: ExplainedPlan, change: Change, shard: int | None) -> PlacedPlan:
    full = subject.plan.replace(**change).resolve()
    return PlacedPlan(placement_of(full), shard, change, plan_figures(full, subject.figures.risk))


def shard_within_rack(full: ResolvedPlan, order: tuple[str, ...]) -> int | None:
    """Ranks of the largest shard groups that all stay in a rack, where states are sharded over all
    and leave it; None where no groups do.
    """
    s, rack_nodes = full.strategy, full.fabric.rack_nodes
    if not s.data.zero or s.data.shard != "all" or not rack_nodes or full.sizes["context"] > 1:
        return None
    replicas, rack = full.sizes["data"], rack_nodes * int(full.cluster.gpus_per_node or 1)
    stride = axis_strides(order, full.sizes)["data"]
    if replicas * stride <= rack:
        return None
    inside = [n for n in range(2, replicas) if replicas % n == 0 and rack % (n * stride) == 0]
    return max(inside, default=None)


def _cells(one: PlacedPlan, full: ResolvedPlan, best: float, axes: list[str]) -> tuple[str, ...]:
    traffic: dict[str, AxisTraffic] = {axis.axis: axis for axis in one.placement.axes}
    return (
        ", ".join(axis for axis in one.placement.order if axis in axes),
        _sharding(one, full),
        duration_text(one.figures.seconds),
        f"{one.figures.seconds / best:.3f}",
        gib_text(one.figures.peak_bytes),
        *(f"{bytes_text(traffic[axis].bytes)} {traffic[axis].where}" for axis in axes),
    )


def _sharding(one: PlacedPlan, full: ResolvedPlan) -> str:
    if not full.strategy.data.zero:
        return "no"
    if one.shard is not None:
        return f"over {one.shard}, within racks"
    if full.strategy.data.shard != "all":
        return f"over {full.strategy.data.shard}"
    data = next((axis for axis in one.placement.axes if axis.axis == "data"), None)
    reach = {"node": "within nodes", "network": "within racks", "racks": "across racks"}
    return "over all" + (f", {reach[data.reach]}" if data and full.fabric.rack_nodes else "")


def _tree(full: ResolvedPlan) -> str:
    """The levels of the network, in a line."""
    nodes, per_node = int(full.cluster.nodes or 1), int(full.cluster.gpus_per_node or 1)
    fabric = full.fabric
    levels = [f"{nodes:,} nodes of {per_node} GPUs ({fabric.nic_gbs:g} GB/s out of a node)"]
    if fabric.rack_nodes and nodes > fabric.rack_nodes:
        racks = -(-nodes // fabric.rack_nodes)
        out = fabric.rack_gbs or fabric.nic_gbs
        levels.insert(
            0, f"{racks:,} racks of {fabric.rack_nodes} nodes ({out:g} GB/s a node out of a rack)"
        )
    return f"Network: {', '.join(levels)}."


def _json(one: PlacedPlan, full: ResolvedPlan, best: float) -> dict[str, Any]:
    return {
        "placement": list(one.placement.order),
        "shard": one.shard or full.strategy.data.shard,
        "changes": one.changes,
        "step_seconds": one.figures.seconds,
        "times_the_best": one.figures.seconds / best,
        "peak_bytes": one.figures.peak_bytes,
        "fits": one.figures.fits,
        "axes": [asdict(axis) for axis in one.placement.axes],
    }
