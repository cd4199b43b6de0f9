"""Nodes of equal devices, their links, and the three ways to give a stage its devices (DAPPLE,
2007.01045, section 4): fresh nodes first, used nodes first, or spread over the used nodes.

Devices of a node are alike, and so are nodes: a stage's devices are a count by node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

Counts = tuple[int, ...]
"""Devices by node."""
POLICIES = ("fresh", "append", "scatter")


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `devices` devices each; rates in bytes/s, one direction."""

    nodes: int
    devices: int
    device_rate: float
    """Between two devices of a node."""
    network_rate: float
    """Between two nodes, point to point."""
    collective_rate: float
    """Of a ring that leaves a node."""
    most_rings: int = 1
    """Rings that a collective inside a node runs at once; each needs two devices of its own."""
    memory: float = math.inf
    """Bytes of a device."""

    @property
    def world_size(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    def all_reduce_per_byte(self, counts: Counts) -> float:
        """Seconds for each byte of an all-reduce in rings over the devices `counts`."""
        ranks = sum(counts)
        if ranks == 1:
            return 0.0
        moved = 2 * (ranks - 1) / ranks
        if max(counts) < ranks:
            return moved / self.collective_rate
        return moved / (self.device_rate * min(ranks // 2, self.most_rings))

    def transfer_per_byte(self, senders: Counts, receivers: Counts) -> float:
        """Seconds for each byte of a microbatch's activations from one stage to the next.

        Each stage splits the microbatch evenly. A replica gets what its own node computed as far
        as that goes; the rest leaves one node's link and enters another's, all links at once, while
        devices of a node exchange their slices.
        """
        before, after = sum(senders), sum(receivers)
        shares = [(p / before, q / after) for p, q in zip(senders, receivers)]
        network = max(abs(p - q) for p, q in shares) / self.network_rate
        local = any(p and q for p, q in shares)
        slice_ = max(1 / before, 1 / after) if local else 0.0
        return max(network, slice_ / self.device_rate)


def device_order(used: Counts, previous: Counts, policy: str, devices: int) -> list[int]:
    """Nodes of the free devices in the order in which `policy` gives them to a stage.

    Of equal nodes, those of the stage before (`previous`) come first.
    """
    nodes = sorted(range(len(used)), key=lambda n: (-used[n], -previous[n], n))
    free = [[n] * (devices - used[n]) for n in nodes]
    on_used = [one for one in free if one and used[one[0]]]
    on_fresh = [one for one in free if one and not used[one[0]]]
    if policy == "fresh":
        return [*chain(*on_fresh, *on_used)]
    if policy == "append":
        return [*chain(*on_used, *on_fresh)]
    return _spread(on_used) + _spread(on_fresh)


def _spread(nodes: Sequence[Sequence[int]]) -> list[int]:
    """One device of each node in turn."""
    return [node for turn in zip_longest(*nodes) for node in turn if node is not None]


def place(used: Counts, previous: Counts, policy: str, replicas: int, devices: int) -> Counts:
    """Devices by node that `policy` gives to a stage of `replicas` replicas."""
    chosen = device_order(used, previous, policy, devices)[:replicas]
    return tuple(chosen.count(node) for node in range(len(used)))
