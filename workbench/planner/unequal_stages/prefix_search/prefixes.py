"""Prefixes of a pipeline, and which of them the search keeps.

With P the forwards before a stage and Q the backwards, its pivot path is P + M (F + B) + Q, and
the all-reduce of a stage before it ends AR - Q' later: all that a prefix needs are P + Q, Q, the
largest AR - Q' (`reduced`) and the longest path so far. Where memory allows few microbatches in
flight, so many at a time make the round trip from that stage to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.planner.unequal_stages.placements import placed
from workbench.planner.unequal_stages.stage_times import Stage
from workbench.planner.unequal_stages.topology import Floats, Ints, Topology

SORTED = 20
"""Times as many prefixes as are kept of a layer are looked at by occupancy."""


@dataclass(frozen=True)
class Prefixes:
    """Prefixes that end before one layer, one an index."""

    occupancy: Ints
    """Its key."""
    used: Ints
    """Devices."""
    ways: Floats
    """Forwards and backwards of one microbatch, transfers included."""
    back: Floats
    """Backwards alone."""
    reduced: Floats
    """How much later than the first stage's last backward an all-reduce can end."""
    longest: Floats
    held: Ints
    """Microbatches that memory allows in flight at the stage with fewest."""
    trip: Floats
    """Forwards and backwards of one microbatch from that stage on."""
    bound: Floats
    """Seconds that no plan with this prefix is under."""
    parent_layer: Ints
    parent: Ints
    """Index of the prefix less its last stage, among those of its layer."""
    replicas: Ints
    policy: Ints

    def take(self, index: Ints) -> Prefixes:
        """Those at `index`."""
        return Prefixes(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def no_stages() -> Prefixes:
    """The one prefix before the first layer."""
    none, zero = np.full(1, -1, dtype=np.int64), np.zeros(1)
    start = np.zeros(1, dtype=np.int64)
    most = np.full(1, np.iinfo(np.int64).max)
    return Prefixes(start, start, zero, zero, zero, zero, most, zero, zero, none, none, none, none)


def joined(parts: Sequence[Prefixes]) -> Prefixes:
    """Those of all parts."""
    names = Prefixes.__dataclass_fields__
    return Prefixes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def best(found: Prefixes, each: int, most: int) -> Prefixes:
    """The `each` least bounds of every occupancy, of these the `most` least."""
    if len(found.bound) > SORTED * most:
        found = found.take(np.argpartition(found.bound, SORTED * most)[: SORTED * most])
    order = np.lexsort((found.ways, found.bound, found.occupancy))
    occupancy = found.occupancy[order]
    starts = np.flatnonzero(np.r_[True, occupancy[1:] != occupancy[:-1]])
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    chosen = order[place < each]
    if len(chosen) > most:
        chosen = chosen[np.lexsort((found.ways[chosen], found.bound[chosen]))[:most]]
    return found.take(chosen)


def stages_of(
    kept: Mapping[int, Prefixes], layer: int, index: int, topology: Topology
) -> tuple[Stage, ...]:
    """The stages of prefix `index` of those kept before `layer`."""
    ends, replicas, policies = [], [], []
    while layer:
        prefixes = kept[layer]
        ends.append(layer)
        replicas.append(int(prefixes.replicas[index]))
        policies.append(int(prefixes.policy[index]))
        layer, index = int(prefixes.parent_layer[index]), int(prefixes.parent[index])
    return placed(ends[::-1], replicas[::-1], policies[::-1], topology)
