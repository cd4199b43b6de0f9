"""What one collective costs: latency and bandwidth of the axis that it runs over (alpha-beta)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.plan.schema import Plan
from workbench.planner.constants import Constants

SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Times (n-1)/n of the full tensor that a rank sends, by kind (rings)."""


@dataclass(frozen=True)
class Link:
    """One axis as its collectives see it."""

    size: int
    bandwidth: float
    """Bytes a second of one rank."""
    latency: float
    """Seconds a hop."""


def links(plan: Plan, constants: Constants) -> dict[str, Link]:
    """The link of each axis, from the placement: an axis inside a node rides its links, one beyond shares its network.

    Inter-node bandwidth of a rank = the node's network / the groups of that axis that cross it at once.
    """
    node, fabric, card = int(plan.cluster.gpus_per_node or 1), plan.fabric, plan.card
    result: dict[str, Link] = {}
    stride = 1
    for axis in plan.strategy.placement:
        size = plan.sizes[axis]
        inside = max(1, min(size, node // stride)) if stride < node else 1
        if size * stride <= node or size == 1:
            result[axis] = Link(size, card.link_gbs * 1e9 * constants.link_share, fabric.link_latency_us * 1e-6)
        else:
            # `node / inside` groups leave a node together; the ranks of one group in a node share the group's part.
            rate = fabric.nic_gbs * 1e9 * constants.nic_share * inside / node
            rate = min(rate, card.link_gbs * 1e9 * constants.link_share)
            result[axis] = Link(size, rate, fabric.nic_latency_us * 1e-6)
        stride *= size
    return result


def joint(links: dict[str, Link], axes: tuple[str, ...]) -> Link:
    """The link of a group that spans several axes: the slowest of those longer than 1."""
    long = [links[a] for a in axes if links[a].size > 1] or [links[axes[0]]]
    return Link(math.prod(links[a].size for a in axes), min(x.bandwidth for x in long), max(x.latency for x in long))


def seconds(kind: str, size: float, link: Link, constants: Constants) -> float:
    """One call, ring costs; a latency that stops growing beyond `latency_ranks` (trees)."""
    n = link.size
    if n <= 1:
        return 0.0
    if kind in ("send", "recv"):
        return size / link.bandwidth + link.latency
    hops = min(n - 1, constants.latency_ranks) * (2 if kind == "all_reduce" else 1)
    return SHARE[kind] * (n - 1) / n * size / link.bandwidth + hops * link.latency
