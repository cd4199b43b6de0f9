"""Every further stage of the prefixes that end before a layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.memory import most_in_flight
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.prefix_search.prefixes import Prefixes
from workbench.planner.unequal_stages.prefix_search.transitions import Occupancies, Transitions
from workbench.planner.unequal_stages.stage_times import Batch
from workbench.planner.unequal_stages.topology import Floats, Ints, Topology


@dataclass(frozen=True)
class _Stages:
    """Stages that may come next, one an index; all have the same first layer."""

    first: int
    end: Ints
    parent: Ints
    """Index of the prefix that each makes longer."""
    place: Ints
    """Index of its placement among all of all prefixes."""
    replicas: Ints
    free: Ints
    """Devices that it leaves."""
    part: Floats
    """Profiled passes that its busiest replica does for one microbatch."""
    rest: Floats
    """Seconds that the layers after it take if every device left shares them evenly."""


@dataclass(frozen=True)
class _Paths:
    """What `Prefixes` says of the paths through a longer prefix."""

    ways: Floats
    back: Floats
    reduced: Floats
    longest: Floats


class Extension:
    """Every further stage of the prefixes of a layer, none of over `limit` seconds."""

    def __init__(
        self,
        profile: LayerProfile,
        topology: Topology,
        occupancies: Occupancies,
        batch: Batch,
        limit: float,
    ) -> None:
        self.profile, self.topology, self.batch, self.limit = profile, topology, batch, limit
        self.occupancies = occupancies
        self.forward, self.backward = np.array(profile.forward), np.array(profile.backward)
        self.both = self.forward + self.backward
        self.crossing = np.array(profile.crossing)
        self.sent = batch.sequences / profile.profile_batch
        self.least = batch.least_passes(profile)

    def extend(self, layer: int, prefixes: Prefixes) -> list[tuple[int, Prefixes]]:
        """Prefixes one stage longer, by the layer before which they end."""
        parent, way = self._ways(prefixes.occupancy)
        stages = self._stages(layer, parent, way.replicas, prefixes)
        longer = self._longer(stages, prefixes, way)
        good = np.flatnonzero((longer.bound <= self.limit) & (longer.held > 0))
        self.occupancies.note(way.key[stages.place[good]], way.after[stages.place[good]])
        order = good[np.argsort(stages.end[good], kind="stable")]
        ends, found = stages.end[order], longer.take(order)
        bounds = np.r_[np.flatnonzero(np.diff(ends, prepend=-1)), len(ends)]
        return [(int(ends[a]), found.take(np.arange(a, b))) for a, b in pairwise(bounds)]

    def _ways(self, occupancy: Ints) -> tuple[Ints, Transitions]:
        """All placements of all prefixes, and the index of the prefix of each."""
        numbers, inverse = np.unique(occupancy, return_inverse=True)
        each = self.occupancies.transitions(numbers)
        sizes = np.array([len(ways.replicas) for ways in each])
        starts = np.cumsum(sizes) - sizes
        parent, at = _runs(sizes[inverse])
        at += starts[inverse][parent]
        joined = Transitions(
            *(
                np.concatenate([getattr(ways, name) for ways in each])[at]
                for name in Transitions.__dataclass_fields__
            )
        )
        return parent, joined

    def _stages(self, layer: int, parent: Ints, replicas: Ints, prefixes: Prefixes) -> _Stages:
        """Every end of every placement."""
        free = self.topology.world_size - prefixes.used[parent] - replicas
        first, last = self._ends(layer, replicas, free)
        place, end = _runs(np.maximum(last - first + 1, 0))
        end += first[place]
        replicas, free = replicas[place], free[place]
        work = self.least * self.batch.microbatches * (self.both[-1] - self.both[end])
        rest = work / np.maximum(free, 1)
        part = self._part(replicas)
        return _Stages(layer, end, parent[place], place, replicas, free, part, rest)

    def _part(self, replicas: Ints) -> Floats:
        """Profiled passes of the busiest replica a microbatch; infinite where one has nothing."""
        takes = self.batch.takes(replicas)
        return np.where(takes, self.batch.passes_of(replicas, self.profile), np.inf)

    def _ends(self, layer: int, replicas: Ints, free: Ints) -> tuple[Ints, Ints]:
        """First and last layer before which the stage may end, by the work that it and what
        follows may have within the limit.
        """
        layers, part = len(self.both) - 1, self._part(replicas)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = self.limit / (part * self.batch.microbatches)
            rest = self.limit * free / (self.least * self.batch.microbatches)
        last = np.searchsorted(self.both, self.both[layer] + share, side="right") - 1
        first = np.searchsorted(self.both, self.both[-1] - rest, side="left")
        last = np.where(np.isinf(part), layer, np.minimum(last, layers - (free > 0)))
        # The stage that takes the last device takes the last layer.
        first = np.where(free > 0, np.maximum(first, layer + 1), layers)
        return first, np.where((free == 0) & (last < layers), layer, last)

    def _longer(self, stages: _Stages, prefixes: Prefixes, way: Transitions) -> Prefixes:
        """The prefixes with each of `stages`, whether within limit and memory or not."""
        transfer = self.sent * self.crossing[stages.first] * way.transfer[stages.place]
        forward, backward = (
            stages.part * (sums[stages.end] - sums[stages.first])
            for sums in (self.forward, self.backward)
        )
        paths = self._paths(stages, prefixes, way, transfer, (forward, backward))
        held, trip = self._round_trip(stages, prefixes, 2 * transfer, forward + backward)
        return Prefixes(
            occupancy=way.key[stages.place],
            used=prefixes.used[stages.parent] + stages.replicas,
            **vars(paths),
            held=held,
            trip=trip,
            bound=self._bound(stages, paths, held, trip),
            parent_layer=np.full(len(stages.end), stages.first),
            parent=stages.parent,
            replicas=stages.replicas,
            policy=way.policy[stages.place],
        )

    def _paths(
        self,
        stages: _Stages,
        prefixes: Prefixes,
        way: Transitions,
        transfer: Floats,
        passes: tuple[Floats, Floats],
    ) -> _Paths:
        """The pivot paths with the transfer and the stage as pivots too."""
        parent, microbatches = stages.parent, self.batch.microbatches
        forward, backward = passes
        reduced = prefixes.reduced[parent]
        before = prefixes.ways[parent] + 2 * microbatches * transfer + reduced
        ways = prefixes.ways[parent] + 2 * transfer
        back = prefixes.back[parent] + transfer
        size = stage_parameter_bytes(self.profile, stages.first, stages.end)
        reduced = np.maximum(reduced, size * way.all_reduce[stages.place] - back)
        own = ways + microbatches * (forward + backward) + reduced
        longest = np.maximum(np.maximum(prefixes.longest[parent], before), own)
        return _Paths(ways + forward + backward, back + backward, reduced, longest)

    def _round_trip(
        self, stages: _Stages, prefixes: Prefixes, transfers: Floats, passes: Floats
    ) -> tuple[Ints, Floats]:
        """Microbatches in flight at the stage with fewest, and their way from there on."""
        fitting = most_in_flight(self.profile, stages, self.topology, self.batch)
        fewer = fitting < prefixes.held[stages.parent]
        held = np.where(fewer, fitting, prefixes.held[stages.parent])
        return held, np.where(fewer, 0.0, prefixes.trip[stages.parent] + transfers) + passes

    def _bound(self, stages: _Stages, paths: _Paths, held: Ints, trip: Floats) -> Floats:
        """Seconds of the longest path, were the layers left shared evenly."""
        after = np.where(stages.free > 0, paths.ways + paths.reduced + stages.rest, paths.longest)
        trips = np.ceil(self.batch.microbatches / np.maximum(held, 1))
        around = trips * (trip + stages.rest / self.batch.microbatches)
        found: Floats = np.maximum(np.maximum(paths.longest, after), around)
        return found


def _runs(counts: Ints) -> tuple[Ints, Ints]:
    """(i, 0), (i, 1) ... up to `counts[i]` for every i."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
