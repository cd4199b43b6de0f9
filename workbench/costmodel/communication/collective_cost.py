"""Seconds of a collective: the alpha-beta model, latency (alpha) plus bytes over bandwidth (beta).

Latency and bandwidth are those of the mesh axis, which the placement of ranks in nodes and racks
decides (hierarchical alpha-beta).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.operator_strategies import group_name
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.measured_operators import MeasuredOperators
from workbench.machine.hardware import GPU, Fabric

WIRE_FACTOR = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
}
"""Times (n-1)/n of the full tensor that a rank sends in a ring, by kind; in n broadcasts a rank is
the root of one.
"""


@dataclass(frozen=True)
class AxisLink:
    """Network that the collectives of one mesh axis see."""

    bandwidth: Number
    """Bytes/s of one rank."""
    latency: Number
    """Seconds per hop."""
    measured: MeasuredOperators | None = None
    """Collectives as they were measured on a machine of CPU ranks, which count instead."""


def axis_links(w: Workload, constants: Constants) -> dict[str, AxisLink]:
    """Bandwidth and latency of each mesh axis, from the placement.

    An axis inside a node uses its links (NVLink, PCIe). One that leaves it shares the node's
    network with the other groups that leave at the same time; one that leaves a rack shares the
    rack's uplink. The sides of a tensor grid take turns. Of `usp`, the all-to-all runs between
    neighbors, inside the node where it fits, and the ring around the groups.

    Returns:
        Axis -> link, for tensor, context, data, pipeline and expert; where not all replicas share
        one sharding also for data.shard, within a group that shards, and data.replicas, between
        such groups; with `usp` for context.ulysses and context.ring; for each group of the grid
        that tensor ranks are to operator strategies.
    """
    s, k = w.fixed, w.searched
    sizes = {"tensor": k.tensor, "context": k.context, "data": w.data, "pipeline": s.pipeline}
    result = {axis: _link(w, constants, size, k.strides[axis]) for axis, size in sizes.items()}
    if s.algorithm != "1d":
        sides, side = 3 if s.algorithm == "3d" else 2, k.grid[0]
        each = [_link(w, constants, side, k.strides["tensor"] * side**n) for n in range(sides)]
        slowness, latency = sum(1 / one.bandwidth for one in each), sum(one.latency for one in each)
        result["tensor"] = AxisLink(sides / slowness, latency / sides, each[0].measured)
    if s.grid is not None:
        for axes in s.grid.groups():
            ranks, apart = s.grid.group(axes)
            result[group_name(axes)] = _link(w, constants, ranks, k.strides["tensor"] * apart)
    if s.context_algorithm == "usp":
        stride = k.strides["context"]
        result["context.ulysses"] = _link(w, constants, w.ulysses, stride)
        result["context.ring"] = _link(w, constants, w.ring, stride * w.ulysses)
    # Gradients are reduced over data x context ranks, and MoE's all-to-all runs over them too:
    # the slower of the two axes decides.
    data, context = result["data"], result["context"]
    alone, lone = w.data == 1, k.context == 1
    slow = np.where(
        lone,
        data.bandwidth,
        np.where(alone, context.bandwidth, np.minimum(data.bandwidth, context.bandwidth)),
    )
    late = np.where(
        lone,
        data.latency,
        np.where(alone, context.latency, np.maximum(data.latency, context.latency)),
    )
    both = AxisLink(slow, late, data.measured)
    result |= {"data": both, "expert": both}
    if w.shape.moe:
        result["expert"] = _neighbors_link(w, constants, w.searched.expert, both)
    return result | (_shard_links(w, constants, both) if w.zero else {})


def _neighbors_link(
    w: Workload, constants: Constants, size: Number, both: AxisLink, spread: bool = True
) -> AxisLink:
    """Link between `size` neighbors among data x context ranks: those of an MoE's all-to-all,
    which are neighbors among the tensor ranks too between which experts are `spread`, or those
    that shard states.

    Neighbors of both axes lie as `both` says where another axis is placed between the two.
    """
    over_tensor = w.experts_over_tensor if spread else 1.0
    stride, inner, outer = _inner_replicas(w)
    own = _link(w, constants, size, stride / over_tensor)
    apart = (size > inner * over_tensor) & (outer != stride * inner)
    return _either(apart, both, own)


def _inner_replicas(w: Workload) -> tuple[Number, Number, Number]:
    """(distance in ranks between neighbors of the inner of the axes data and context, its size,
    distance between neighbors of the outer one), of axes of several ranks.
    """
    k, far = w.searched, np.inf
    strides = [
        np.where(size > 1, k.strides[axis], far)
        for axis, size in (("data", w.data), ("context", k.context))
    ]
    stride = np.minimum(*strides)
    inner = np.where(strides[0] <= strides[1], w.data, k.context)
    return np.where(np.isinf(stride), k.tensor, stride), inner, np.maximum(*strides)


def _shard_links(w: Workload, constants: Constants, both: AxisLink) -> dict[str, AxisLink]:
    """Links of a group of neighbors that shard states, and between the groups that hold the same
    (HSDP, 2304.11277; `zero1` of InternEvo).
    """
    replicas, shard = w.data * w.searched.context, w.searched.shard
    if np.all(shard == replicas):
        return {}
    stride, _, outer = _inner_replicas(w)
    between = _link(w, constants, replicas / shard, stride * shard)
    alike = np.asarray(shard == replicas)
    apart = alike | ~np.isinf(outer)
    return {
        "data.shard": _either(
            alike, both, _neighbors_link(w, constants, shard, both, spread=False)
        ),
        "data.replicas": _either(apart, both, between),
    }


def _either(apart: Number, both: AxisLink, own: AxisLink) -> AxisLink:
    return AxisLink(
        np.where(apart, both.bandwidth, own.bandwidth),
        np.where(apart, both.latency, own.latency),
        both.measured,
    )


def _link(w: Workload, constants: Constants, size: Number, stride: Number) -> AxisLink:
    """Link between `size` ranks that are `stride` ranks apart."""
    s = w.fixed
    return group_link(s.gpu, s.fabric, s.gpus_per_node, constants, size, stride)


def group_link(
    gpu: GPU, fabric: Fabric, gpus_per_node: int, constants: Constants, size: Number, stride: Number
) -> AxisLink:
    """What a group of `size` ranks, `stride` ranks apart, sees of the network.

    Args:
        gpu: The GPU, for the bandwidth of its links inside the node.
        fabric: The network between nodes, and between racks where it has them.
        gpus_per_node: GPUs of a node.
        constants: Shares of those bandwidths that collectives reach.
        size: Ranks of the group.
        stride: Distance in ranks between neighbors of the group.
    """
    own = constants.measured
    measured = own if own is not None and own.has_collectives else None
    inner = gpu.link_gbs * 1e9 * constants.link_share
    reached = constants.nic_in_step * (fabric.nic_share or constants.nic_share)
    outer = fabric.nic_gbs * 1e9 * reached
    within = (size * stride <= gpus_per_node) | (size == 1)
    inside = np.maximum(1, np.minimum(size, gpus_per_node // stride))
    # `gpus_per_node / inside` groups of this axis leave a node at the same time and share its
    # network; the ranks of one group inside the node share the group's part.
    bandwidth = np.where(within, inner, np.minimum(inner, outer * inside / gpus_per_node))
    latency = 1e-6 * _hop_latency_us(size, inside, fabric)
    if fabric.rack_nodes is None:
        return AxisLink(bandwidth, latency, measured)
    rack = gpus_per_node * fabric.rack_nodes
    leaves_rack = np.where(size * stride > rack, size > 1, False)
    inside_rack = np.maximum(1, np.minimum(size, rack // stride))
    # The same one level up: groups that leave a rack share its uplink.
    rack_gbs = fabric.rack_gbs or fabric.nic_gbs
    uplink = rack_gbs * 1e9 * reached * inside_rack / gpus_per_node
    rack_latency = (
        (fabric.rack_latency_us or fabric.nic_latency_us) - fabric.nic_latency_us
    ) / inside_rack
    return AxisLink(
        np.where(leaves_rack, np.minimum(bandwidth, uplink), bandwidth),
        latency + leaves_rack * 1e-6 * rack_latency,
        measured,
    )


def _hop_latency_us(size: Number, inside: Number, fabric: Fabric) -> Number:
    """Latency of a ring's hop in microseconds: its ranks move in lockstep, so the slowest hop
    decides.
    """
    return np.where(
        size > inside, max(fabric.nic_latency_us, fabric.link_latency_us), fabric.link_latency_us
    )


def collective_seconds(
    kind: str, size: Number, ranks: Number, link: AxisLink, constants: Constants
) -> Number:
    """Seconds of one call by the ring's alpha-beta cost; zero for one rank.

    An all-reduce is a reduce-scatter and an all-gather: 2 (n-1)/n of the bytes. Its latency stops
    growing at `latency_ranks`, where NCCL switches to trees. Broadcast and reduce pass from rank to
    rank around a ring, which NCCL has no trees for (src/graph/tuning.cc: as many steps as ranks).
    An all-to-all is no ring: its sends and recvs are
    one group, whose calls progress independently (NCCL user guide, Point-to-point communication).

    Args:
        kind: Kind of collective.
        size: Bytes of the full tensor.
        ranks: Size of the group.
        link: Network of the axis.
        constants: `latency_ranks`.
    """
    if link.measured is not None:
        return link.measured.collective_seconds(kind, size, ranks)
    per_byte, per_call = collective_slope(kind, ranks, link, constants)
    seconds: Number = size * per_byte + per_call
    return seconds


def collective_slope(
    kind: str, ranks: Number, link: AxisLink, constants: Constants
) -> tuple[Number, Number]:
    """(seconds per byte, seconds per call) of `collective_seconds`."""
    if kind in ("send", "recv"):
        return 1 / link.bandwidth, link.latency
    if kind == "all_to_all":
        hops = np.minimum(ranks - 1, 1)  # sends and recvs of one group progress at once
    else:
        hops = (
            np.minimum(ranks - 1, constants.latency_ranks) * 2
            if kind == "all_reduce"
            else ranks - 1
        )
    return WIRE_FACTOR[kind] * (ranks - 1) / ranks / link.bandwidth, hops * link.latency


def level_seconds(
    kind: str, size: float, levels: Sequence[tuple[int, AxisLink]], constants: Constants
) -> Iterator[float]:
    """One call over several mesh axes, level by level: rings along the innermost axis first (Thakur
    et al. 2005).

    Every level leaves the next one 1/n of the tensor: an all-reduce over nodes x GPUs crosses the
    network with what a GPU has reduced inside its node. An all-to-all leaves it all.

    Args:
        kind: The collective.
        size: Bytes of the tensor that is summed, or once gathered, or of a rank's part of what is
            exchanged.
        levels: (ranks, link) of each level, innermost first.
        constants: Of the cost model.
    """
    left = size
    for ranks, link in levels:
        yield float(collective_seconds(kind, left, ranks, link, constants))
        # Of an all-to-all a rank holds as much on every level as it began with.
        left /= 1 if kind == "all_to_all" else ranks


@dataclass(frozen=True)
class AlikeCalls:
    """Collectives of one kind among the same ranks over the same links."""

    kind: str
    sub_axis: str
    calls: list[CollectiveCall]

    @cached_property
    def count(self) -> Number:
        """Of all calls."""
        return sum_of([c.count for c in self.calls])

    @cached_property
    def moved(self) -> Number:
        """Bytes of all calls."""
        return sum_of([c.count * c.bytes for c in self.calls])


def sum_of(terms: list[Number]) -> Number:
    """Their sum; a zero before the first would cost a search one more pass over it."""
    return reduce(add, terms)


def alike_calls(
    calls: Iterable[CollectiveCall], axis: str, action: str | None = None
) -> list[AlikeCalls]:
    """The collectives of one axis (and action) by what their cost depends on; a recv is counted
    with its send.
    """
    found: dict[tuple[str, int, str], list[CollectiveCall]] = {}
    for c in calls:
        if c.axis == axis and action in (None, c.action) and c.kind != "recv":
            found.setdefault((c.kind, id(c.group_size), c.sub_axis), []).append(c)
    return [AlikeCalls(kind, sub_axis, each) for (kind, _, sub_axis), each in found.items()]


def comm_seconds(
    calls: Iterable[CollectiveCall],
    links: dict[str, AxisLink],
    constants: Constants,
    axis: str,
    action: str | None = None,
) -> Number:
    """Seconds per step that each pipeline rank spends in the collectives of one axis (and
    action).
    """
    return alike_seconds(alike_calls(calls, axis, action), links, constants, axis)


def alike_seconds(
    every: list[AlikeCalls], links: dict[str, AxisLink], constants: Constants, axis: str
) -> Number:
    """Seconds per step that each pipeline rank spends in some collectives of one axis."""
    each = [_alike_seconds(one, links.get(one.sub_axis, links[axis]), constants) for one in every]
    return sum_of(each) if each else 0.0


def _alike_seconds(every: AlikeCalls, link: AxisLink, constants: Constants) -> Number:
    """Every cost that is not measured is linear in bytes: calls cost what one call of the bytes of
    all does, and their latencies. A search spends its time here.
    """
    first = every.calls[0]
    ranks = first.group_size
    if link.measured is not None:
        seconds, name = link.measured.collective_seconds, measured_kind(first)
        return sum(c.count * seconds(name, c.bytes, ranks) for c in every.calls)
    if len(every.calls) == 1:
        return first.count * collective_seconds(every.kind, first.bytes, ranks, link, constants)
    per_byte, per_call = collective_slope(every.kind, ranks, link, constants)
    return every.moved * per_byte + every.count * per_call


def measured_kind(c: CollectiveCall) -> str:
    """What a call was measured as: around a ring every rank sends and receives at once."""
    return "exchange" if c.kind == "send" and c.axis == "context" else c.kind
