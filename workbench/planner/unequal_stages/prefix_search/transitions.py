"""Where the next stage may be placed, from each occupancy that the search comes to.

Nodes are alike: an occupancy is, for each node, how many devices are used and how many of them the
last stage has, nodes in the order of these numbers. Two that differ in the nodes' numbers alone are
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.planner.unequal_stages.placements import POLICIES, counts_of
from workbench.planner.unequal_stages.topology import Floats, Ints, Topology

MOST_SIZES = 64
"""Numbers of replicas that are tried for a stage."""


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


def stage_sizes(devices: int) -> Ints:
    """Numbers of replicas that a stage may have: all, but of many devices multiples of the least
    number that leaves `MOST_SIZES` of them.
    """
    step = next(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= MOST_SIZES)
    return np.arange(step, devices + 1, step)


class Occupancies:
    """Occupancies that prefixes have, by key, and the transitions from them."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.sizes = stage_sizes(topology.world_size)
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
            self.topology.all_reduce_per_byte(counts),
            self._transfer(before[origin], counts),
        )
        bounds = np.searchsorted(origin, np.arange(len(keys) + 1))
        for key, first, end in zip(keys, bounds, bounds[1:]):
            self._transitions[key] = found.take(slice(first, end))

    def _ways(self, used: Ints) -> tuple[Ints, Ints, Ints]:
        """Devices by node of every placement after each row of `used`, which row, which policy."""
        free = self.topology.devices - used
        wanted = self.sizes
        each = [counts_of(free, used > 0, policy, wanted) for policy in POLICIES]
        possible = wanted <= free.sum(axis=1)[:, None]
        new = [possible]
        for policy in range(1, len(each)):
            differs = [(each[policy] != other).any(axis=2) for other in each[:policy]]
            new.append(np.logical_and.reduce([possible, *differs]))
        origin, which, at = np.nonzero(np.stack(new, axis=1))
        return np.stack(each, axis=1)[origin, which, at], origin, which

    def _transfer(self, before: Ints, counts: Ints) -> Floats:
        """Seconds for each byte from the stage before; 0 where there is none."""
        follows = before.any(axis=1)
        found = np.zeros(len(counts))
        found[follows] = self.topology.transfer_per_byte(before[follows], counts[follows])
        return found
