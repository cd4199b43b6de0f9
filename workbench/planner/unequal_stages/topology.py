"""Nodes of equal devices, and what their links cost for each byte.

Devices of a node are alike, and so are nodes: a stage's devices are a count by node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Counts = tuple[int, ...]
"""Devices by node."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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

    def all_reduce_per_byte(self, counts: ArrayLike) -> Floats:
        """Seconds for each byte of an all-reduce in rings over the devices `counts`.

        Args:
            counts: Devices by node, `[..., nodes]`.

        Returns:
            `[...]`.
        """
        counts = np.asarray(counts)
        ranks = counts.sum(axis=-1)
        rings = np.clip(ranks // 2, 1, self.most_rings)
        inside = counts.max(axis=-1) == ranks
        rate = np.where(inside, self.device_rate * rings, self.collective_rate)
        found: Floats = 2 * (ranks - 1) / ranks / rate
        return found

    def exchange_per_byte(self, some: Counts, others: Counts) -> float:
        """Seconds for each byte that two stages exchange, where each device gets all of it from one
        of the other stage: the stage with fewer devices sends several copies.

        Args:
            some: Devices by node of one stage; at least one.
            others: Those of the other.
        """
        counts = np.array([some, others])
        sizes = counts.sum(axis=1)
        copies = np.ceil(sizes[::-1] / sizes)
        if np.count_nonzero(counts.sum(axis=0)) == 1:
            return float(copies.max()) / self.device_rate
        return float((counts.max(axis=1) * copies).max()) / self.network_rate

    def transfer_per_byte(self, senders: ArrayLike, receivers: ArrayLike) -> Floats:
        """Seconds for each byte of a microbatch's activations from one stage to the next.

        Each stage splits the microbatch evenly. A replica gets what its own node computed as far
        as that goes; the rest leaves one node's link and enters another's, all links at once, while
        devices of a node exchange their slices.

        Args:
            senders: Devices by node of the stage before, `[..., nodes]`; at least one.
            receivers: Those of the stage after, `[..., nodes]`.

        Returns:
            `[...]`.
        """
        senders, receivers = np.asarray(senders), np.asarray(receivers)
        before, after = (some.sum(axis=-1, keepdims=True) for some in (senders, receivers))
        leaves = np.abs(senders / before - receivers / after).max(axis=-1)
        local = ((senders > 0) & (receivers > 0)).any(axis=-1)
        piece = local * np.maximum(1 / before, 1 / after)[..., 0]
        found: Floats = np.maximum(leaves / self.network_rate, piece / self.device_rate)
        return found
