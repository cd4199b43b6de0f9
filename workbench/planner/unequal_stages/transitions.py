"""Where the next stage may be placed, from each occupancy that the search comes to.

Nodes are alike: an occupancy is, for each node, how many devices are used and how many of them the
last stage has, nodes in the order of these numbers. Two that differ in the nodes' numbers alone are
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.planner.unequal_stages.stage_times import Stage
from workbench.planner.unequal_stages.topology import POLICIES, Topology, place

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Transitions:
    """Ways to place the stage after an occupancy, one an index."""

    replicas: Ints
    policy: Ints
    after: Ints
    """The occupancy that it leads to: both counts of each node in one figure, descending."""
    key: Ints
    """The same in one figure."""
    all_reduce: Floats
    """Seconds for each byte."""
    transfer: Floats
    """Seconds for each byte from the last stage; 0 where there is none."""

    def take(self, index: Ints | slice) -> Transitions:
        """Those at `index`."""
        return Transitions(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


class Occupancies:
    """Occupancies that prefixes have, by key, and the transitions from them."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._radix = topology.devices + 1
        empty = np.zeros((1, topology.nodes), dtype=np.int64)
        self._known: dict[int, Ints] = {}
        self._transitions: dict[int, Transitions] = {}
        self.note(self.keys(empty), empty)

    def keys(self, occupancies: Ints) -> Ints:
        """A figure for each row; the empty occupancy's is 0.

        Two rows have the same by chance once in 2^64; the search then keeps fewer prefixes of both,
        and all that it returns is evaluated without keys.
        """
        odd = 2 * np.arange(occupancies.shape[1], dtype=np.uint64) + np.uint64(3)
        mixed = odd ** np.uint64(41) * np.uint64(0x9E3779B97F4A7C15)
        keys: Ints = (occupancies.astype(np.uint64) * mixed).sum(axis=1).astype(np.int64)
        return keys

    def note(self, keys: Ints, occupancies: Ints) -> None:
        """Keep what `keys` stand for."""
        _, first = np.unique(keys, return_index=True)
        for i in first.tolist():
            self._known.setdefault(int(keys[i]), occupancies[i])

    def transitions(self, keys: Ints) -> list[Transitions]:
        """Ways to place the stage after each of the occupancies noted as `keys`."""
        new = [key for key in keys.tolist() if key not in self._transitions]
        if new:
            self._find(new)
        return [self._transitions[key] for key in keys.tolist()]

    def _find(self, keys: list[int]) -> None:
        """Find the transitions of several occupancies at once."""
        used, before = np.divmod(np.array([self._known[key] for key in keys]), self._radix)
        counts, origin, policy = self._ways(used)
        replicas = counts.sum(axis=1)
        after = -np.sort(-((used[origin] + counts) * self._radix + counts), axis=1)
        found = Transitions(
            replicas,
            policy,
            after,
            self.keys(after),
            self._all_reduce(counts, replicas),
            self._transfer(before[origin], counts, replicas),
        )
        bounds = np.searchsorted(origin, np.arange(len(keys) + 1))
        for key, first, end in zip(keys, bounds, bounds[1:]):
            self._transitions[key] = found.take(slice(first, end))

    def _ways(self, used: Ints) -> tuple[Ints, Ints, Ints]:
        """Devices by node of every placement after each row of `used`, which row, which policy."""
        free = self.topology.devices - used
        wanted = np.arange(1, self.topology.world_size + 1)
        each = [counts_of(free, used > 0, policy, wanted) for policy in POLICIES]
        possible = wanted <= free.sum(axis=1)[:, None]
        new = [possible]
        for policy in range(1, len(each)):
            differs = [(each[policy] != other).any(axis=2) for other in each[:policy]]
            new.append(np.logical_and.reduce([possible, *differs]))
        origin, which, at = np.nonzero(np.stack(new, axis=1))
        return np.stack(each, axis=1)[origin, which, at], origin, which

    def _all_reduce(self, counts: Ints, replicas: Ints) -> Floats:
        """`Topology.all_reduce_per_byte` of every row."""
        moved = 2 * (replicas - 1) / replicas
        rings = np.clip(replicas // 2, 1, self.topology.most_rings)
        inside = counts.max(axis=1) == replicas
        rate = np.where(inside, self.topology.device_rate * rings, self.topology.collective_rate)
        found: Floats = moved / rate
        return found

    def _transfer(self, before: Ints, counts: Ints, replicas: Ints) -> Floats:
        """`Topology.transfer_per_byte` of every row; 0 where no stage stands before."""
        senders = np.maximum(before.sum(axis=1), 1)
        leaves = np.abs(before / senders[:, None] - counts / replicas[:, None]).max(axis=1)
        local = ((before > 0) & (counts > 0)).any(axis=1)
        piece = np.where(local, np.maximum(1 / senders, 1 / replicas), 0.0)
        seconds = np.maximum(leaves / self.topology.network_rate, piece / self.topology.device_rate)
        return np.where(before.any(axis=1), seconds, 0.0)


def counts_of(free: Ints, used: Bools, policy: str, wanted: Ints) -> Ints:
    """Devices by node (last axis) that `policy` gives to stages of `wanted` replicas (axis 1), for
    each row of nodes with `free` devices, those with most used first: what `place` gives, for many
    at once.
    """
    early = ~used if policy == "fresh" else used
    turns = np.arange(int(free.max(initial=0)))
    order = np.where(
        early[:, :, None],
        _places(np.where(early, free, 0), turns, policy),
        _places(np.where(early, 0, free), turns, policy)
        + np.where(early, free, 0).sum(axis=1)[:, None, None],
    )
    order = np.where(turns < free[:, :, None], order, len(wanted))
    given = order[:, None, :, :] < wanted[None, :, None, None]
    found: Ints = given.sum(axis=3)
    return found


def _places(free: Ints, turns: Ints, policy: str) -> Ints:
    """Place in the order of a node's first, second ... device: node by node, or one of each in
    turn.
    """
    if policy != "scatter":
        found: Ints = (np.cumsum(free, axis=1) - free)[:, :, None] + turns
        return found
    has_more = free[:, :, None] > turns
    earlier = np.minimum(free[:, :, None], turns).sum(axis=1, keepdims=True)
    ahead: Ints = earlier + np.cumsum(has_more, axis=1) - has_more
    return ahead


def placed(
    ends: Sequence[int], replicas: Sequence[int], policies: Sequence[int], topology: Topology
) -> tuple[Stage, ...]:
    """Stages that end before layers `ends`, each on devices as its policy gives them."""
    used = before = (0,) * topology.nodes
    first, stages = 0, []
    for end, count, policy in zip(ends, replicas, policies):
        before = place(used, before, POLICIES[policy], count, topology.devices)
        used = tuple(a + b for a, b in zip(used, before))
        stages.append(Stage(first, end, before))
        first = end
    return tuple(stages)
