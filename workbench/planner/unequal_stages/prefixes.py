"""Prefixes of a pipeline, extended stage by stage in the order of the layers at which they end.

With P the forwards before a stage and Q the backwards, its pivot path is P + M (F + B) + Q, and
the all-reduce of a stage before it ends AR - Q' later: all that a prefix needs are P + Q, Q, the
largest AR - Q' (`reduced`) and the longest path so far. Where memory allows few microbatches in
flight, so many at a time make the round trip from that stage to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology
from workbench.planner.unequal_stages.transitions import (
    Floats,
    Ints,
    Occupancies,
    Transitions,
    placed,
)

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


def complete_plans(
    profile: LayerProfile, topology: Topology, batch: Batch, each: int, most: int, limit: float
) -> list[tuple[Stage, ...]]:
    """Stages of the plans on all devices that the search comes to, the best by pivot paths first.

    `each` prefixes are kept of a layer and occupancy, `most` of a layer, none of over `limit`
    seconds.
    """
    extension = _Extension(profile, topology, batch, limit)
    layers = len(profile.layers)
    kept: dict[int, Prefixes] = {}
    waiting: list[list[Prefixes]] = [[] for _ in range(layers + 1)]
    waiting[0].append(_empty())
    for layer in range(layers + 1):
        if waiting[layer]:
            kept[layer] = _best(_joined(waiting[layer]), each, most)
            waiting[layer] = []
            if layer < layers:
                for end, found in extension.extend(layer, kept[layer]):
                    waiting[end].append(found)
    if layers not in kept:
        return []
    order = np.argsort(kept[layers].bound, kind="stable")
    return [_stages(kept, layers, int(i), topology) for i in order]


def _empty() -> Prefixes:
    none, zero = np.full(1, -1, dtype=np.int64), np.zeros(1)
    start = np.zeros(1, dtype=np.int64)
    most = np.full(1, np.iinfo(np.int64).max)
    return Prefixes(start, start, zero, zero, zero, zero, most, zero, zero, none, none, none, none)


def _joined(parts: list[Prefixes]) -> Prefixes:
    return Prefixes(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in Prefixes.__dataclass_fields__
        )
    )


def _best(found: Prefixes, each: int, most: int) -> Prefixes:
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


def _stages(
    kept: dict[int, Prefixes], layer: int, index: int, topology: Topology
) -> tuple[Stage, ...]:
    ends, replicas, policies = [], [], []
    while layer:
        prefixes = kept[layer]
        ends.append(layer)
        replicas.append(int(prefixes.replicas[index]))
        policies.append(int(prefixes.policy[index]))
        layer, index = int(prefixes.parent_layer[index]), int(prefixes.parent[index])
    return placed(ends[::-1], replicas[::-1], policies[::-1], topology)


class _Extension:
    """Every further stage of the prefixes of a layer."""

    def __init__(
        self, profile: LayerProfile, topology: Topology, batch: Batch, limit: float
    ) -> None:
        self.topology, self.batch, self.limit = topology, batch, limit
        self.occupancies = Occupancies(topology)
        self.forward, self.backward = np.array(profile.forward), np.array(profile.backward)
        self.both = self.forward + self.backward
        self.parameters = np.array(profile.parameters)
        self.activations = np.array(profile.activations)
        sequences = batch.sequences / profile.profile_batch
        self.sent = np.array(profile.crossing) * sequences
        self.kept_input = np.array(profile.crossing)
        self.part = np.array(
            [0.0]
            + [
                batch.of_profile(n, profile) if batch.takes(n) else np.inf
                for n in range(1, topology.world_size + 1)
            ]
        )
        self.evenly = sequences * batch.microbatches
        """Passes of a step if they could be shared evenly among devices."""

    def extend(self, layer: int, prefixes: Prefixes) -> list[tuple[int, Prefixes]]:
        """Prefixes one stage longer, by the layer before which they end."""
        parent, way = self._ways(prefixes.occupancy)
        used = prefixes.used[parent] + way.replicas
        free = self.topology.world_size - used
        first, last = self._ends(layer, way.replicas, free)
        counts = np.maximum(last - first + 1, 0)
        pick = np.repeat(np.arange(len(parent)), counts)
        end = np.arange(len(pick)) - np.repeat(np.cumsum(counts) - counts, counts) + first[pick]
        found = self._found(layer, end, prefixes, parent[pick], way, pick, free[pick])
        order = np.argsort(end[found[1]], kind="stable")
        ends, longer = end[found[1]][order], found[0].take(order)
        bounds = np.r_[np.flatnonzero(np.diff(ends, prepend=-1)), len(ends)]
        return [(int(ends[a]), longer.take(np.arange(a, b))) for a, b in pairwise(bounds)]

    def _ways(self, occupancy: Ints) -> tuple[Ints, Transitions]:
        """All placements of all prefixes, and the index of the prefix of each."""
        numbers, inverse = np.unique(occupancy, return_inverse=True)
        each = self.occupancies.transitions(numbers)
        sizes = np.array([len(ways.replicas) for ways in each])
        starts = np.cumsum(sizes) - sizes
        counts = sizes[inverse]
        parent = np.repeat(np.arange(len(occupancy)), counts)
        at = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
        at += starts[inverse][parent]
        joined = Transitions(
            *(
                np.concatenate([getattr(ways, name) for ways in each])[at]
                for name in Transitions.__dataclass_fields__
            )
        )
        return parent, joined

    def _ends(self, layer: int, replicas: Ints, free: Ints) -> tuple[Ints, Ints]:
        """First and last layer before which the stage may end, by the work that it and what
        follows may have within the limit.
        """
        layers = len(self.both) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            share = self.limit / (self.part[replicas] * self.batch.microbatches)
            rest = self.limit * free / self.evenly
        last = np.searchsorted(self.both, self.both[layer] + share, side="right") - 1
        first = np.searchsorted(self.both, self.both[-1] - rest, side="left")
        first = np.maximum(first, layer + 1)
        last = np.where(np.isinf(self.part[replicas]), layer, np.minimum(last, layers - (free > 0)))
        return np.where(free > 0, first, layers), np.where(
            (free == 0) & (last < layers), layer, last
        )

    def _found(
        self,
        layer: int,
        end: Ints,
        prefixes: Prefixes,
        parent: Ints,
        way: Transitions,
        pick: Ints,
        free: Ints,
    ) -> tuple[Prefixes, Ints]:
        """The longer prefixes within limit and memory, and which of the candidates they are."""
        replicas = way.replicas[pick]
        part, microbatches = self.part[replicas], self.batch.microbatches
        forward = part * (self.forward[end] - self.forward[layer])
        backward = part * (self.backward[end] - self.backward[layer])
        transfer = self.sent[layer] * way.transfer[pick]
        size = self.parameters[end] - self.parameters[layer]
        ways, back = prefixes.ways[parent], prefixes.back[parent]
        reduced = prefixes.reduced[parent]
        longest = np.maximum(prefixes.longest[parent], ways + 2 * microbatches * transfer + reduced)
        ways, back = ways + 2 * transfer, back + transfer
        reduced = np.maximum(reduced, size * way.all_reduce[pick] - back)
        longest = np.maximum(longest, ways + microbatches * (forward + backward) + reduced)
        ways, back = ways + forward + backward, back + backward
        fitting = self._fitting(size, layer, end, part)
        fewer = fitting < prefixes.held[parent]
        held = np.where(fewer, fitting, prefixes.held[parent])
        trip = np.where(fewer, 0.0, prefixes.trip[parent] + 2 * transfer) + forward + backward
        rest = self.evenly * (self.both[-1] - self.both[end]) / np.maximum(free, 1)
        bound = np.maximum(longest, np.where(free > 0, ways + reduced + rest, longest))
        trips = np.ceil(microbatches / np.maximum(held, 1))
        bound = np.maximum(bound, trips * (trip + rest / microbatches))
        good = np.flatnonzero((bound <= self.limit) & (held > 0))
        self.occupancies.note(way.key[pick[good]], way.after[pick[good]])
        longer = Prefixes(
            way.key[pick],
            prefixes.used[parent] + replicas,
            ways,
            back,
            reduced,
            longest,
            held,
            trip,
            bound,
            np.full(len(pick), layer),
            parent,
            replicas,
            way.policy[pick],
        )
        return longer.take(good), good

    def _fitting(self, size: Floats, layer: int, end: Ints, part: Floats) -> Ints:
        """Microbatches whose activations fit beside the stage's state; 0 where none does."""
        free = self.topology.memory - size * self.batch.optimizer_factor
        each = self.activations[end] - self.activations[layer] + self.kept_input[layer]
        each = each * self.batch.activation_factor * part
        most = np.full_like(each, self.batch.microbatches)
        fitting = np.divide(free, each, out=most, where=each * self.batch.microbatches > free)
        found: Ints = np.where(free < 0, 0, fitting).astype(np.int64)
        return found
