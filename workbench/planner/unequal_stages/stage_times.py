"""Seconds of each stage of an unequally replicated pipeline, from a layer profile.

A transfer between two stages is a stage of its own, as in DAPPLE (2007.01045): stages 0, 2, 4 ...
of the result compute, 1, 3, 5 ... transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.topology import Counts, Floats, Ints, Topology

Numbers = int | Ints


@dataclass(frozen=True)
class Stage:
    """Layers `first` to before `end`, on `counts` devices of each node."""

    first: int
    end: int
    counts: Counts

    @property
    def replicas(self) -> int:
        """Devices that share each microbatch."""
        return sum(self.counts)


class Cut(Protocol):
    """A stage, or many: whole numbers, or arrays that broadcast against each other."""

    @property
    def first(self) -> Numbers:
        """Its first layer."""

    @property
    def end(self) -> Numbers:
        """The layer before which it ends."""

    @property
    def replicas(self) -> Numbers:
        """Devices that share each microbatch."""


class Cuts(NamedTuple):
    """Stages as arrays."""

    first: Ints
    end: Ints
    replicas: Ints


def cuts(stages: Sequence[Stage]) -> Cuts:
    """Stages of a pipeline as arrays, `[stages]`."""
    return Cuts(*np.array([(one.first, one.end, one.replicas) for one in stages]).T)


@dataclass(frozen=True)
class Batch:
    """What a step trains on, and what a device keeps of it."""

    microbatches: int
    sequences: int
    """Of a microbatch, all replicas of a stage together."""
    whole_sequences: bool = True
    """A replica computes whole sequences, so that the one with most sets the pace; else time and
    memory divide evenly, as if replicas took microbatches in turn.
    """
    optimizer_factor: float = 1.0
    """Bytes of parameters, gradients and optimizer state for each byte of parameters."""
    activation_factor: float = 1.0
    """Bytes kept for backward for each byte that a layer keeps in its profile."""
    gradient_factor: float = 1.0
    """Bytes that are reduced for each byte of parameters."""
    sharded_factor: float = 0.0
    """Bytes of optimizer state for each byte of parameters that the replicas of a stage share
    evenly (ZeRO-1), beside those of `optimizer_factor`.
    """
    passes: tuple[tuple[int, float], ...] = ()
    """(sequences computed at once, profiled passes that take as long), ascending from (0, 0) to at
    least as many as a replica may have, linear in between; none: time is in proportion.
    """

    def takes(self, replicas: Numbers) -> NDArray[np.bool_]:
        """Whether each of `replicas` has something to do."""
        return np.asarray((np.asarray(replicas) <= self.sequences) | (not self.whole_sequences))

    def of_profile(self, replicas: Numbers, profile: LayerProfile) -> Floats:
        """How much of what a profiled pass keeps the busiest of `replicas` has of a microbatch."""
        return self._busiest(replicas) / profile.profile_batch

    def passes_of(self, replicas: Numbers, profile: LayerProfile) -> Floats:
        """Profiled passes that take as long as a microbatch on the busiest of `replicas`."""
        return self.passes_at_once(self._busiest(replicas), profile)

    def passes_at_once(self, sequences: ArrayLike, profile: LayerProfile) -> Floats:
        """Profiled passes that take as long as so many sequences computed at once."""
        if not self.passes:
            return np.asarray(sequences) / profile.profile_batch
        at, passes = np.array(self.passes).T
        return np.asarray(np.interp(np.asarray(sequences, dtype=float), at, passes))

    def least_passes(self, profile: LayerProfile) -> float:
        """Profiled passes of a microbatch at the number of sequences at once that is quickest for
        each, which no way to share it has fewer of, all replicas together.
        """
        known = [at for at, _ in self.passes if 0 < at < self.sequences]
        at = np.array([*known, self.sequences])
        return float(self.sequences * (self.passes_at_once(at, profile) / at).min())

    def _busiest(self, replicas: Numbers) -> Floats:
        """Sequences of a microbatch of the busiest of `replicas`."""
        part = self.sequences / np.asarray(replicas)
        return np.asarray(np.ceil(part) if self.whole_sequences else part)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a microbatch by stage, transfers in between; of an all-reduce (and the exchange of
    a tied weight's gradient), 0 for a transfer.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    all_reduce: tuple[float, ...]

    @property
    def activation_communication_ratio(self) -> float:
        """Mean transfer over mean compute of a microbatch (DAPPLE's ACR); 0 of one stage."""
        both = [f + b for f, b in zip(self.forward, self.backward)]
        compute, transfer = both[::2], both[1::2]
        if not transfer or not any(compute):
            return 0.0
        return sum(transfer) / len(transfer) / (sum(compute) / len(compute))


def stage_times(
    profile: LayerProfile, stages: Sequence[Stage], topology: Topology, batch: Batch
) -> StageTimes:
    """Seconds of every stage and transfer of the pipeline `stages`."""
    counts, (first, end, replicas) = np.array([stage.counts for stage in stages]), cuts(stages)
    part = batch.passes_of(replicas, profile)
    forward, backward = (
        sums[end] - sums[first] for sums in map(np.array, (profile.forward, profile.backward))
    )
    reduce = stage_parameter_bytes(profile, first, end) * topology.all_reduce_per_byte(counts)
    for (one, other), size in profile.tied_stages(first.tolist()).items():
        # After both all-reduces, of which the earlier stage's is the last to start.
        reduce[one] += size * topology.exchange_per_byte(stages[one].counts, stages[other].counts)
    crossing = batch.sequences / profile.profile_batch * np.array(profile.crossing)[first[1:]]
    transfer = crossing * topology.transfer_per_byte(counts[:-1], counts[1:])
    return StageTimes(
        _with_transfers(part * forward, transfer),
        # The gradient of an activation is as large.
        _with_transfers(part * backward, transfer),
        _with_transfers(batch.gradient_factor * reduce, 0 * transfer),
    )


def _with_transfers(stages: Floats, transfers: Floats) -> tuple[float, ...]:
    """Stages in turn with the transfers between them."""
    found = np.zeros(len(stages) + len(transfers))
    found[::2], found[1::2] = stages, transfers
    return tuple(found.tolist())


def one_device_seconds(profile: LayerProfile, batch: Batch) -> float:
    """Seconds of a step's compute on one device, as many sequences of a microbatch at once as is
    quickest, of which a speed-up counts.
    """
    passes = batch.microbatches * batch.least_passes(profile)
    return passes * (profile.forward[-1] + profile.backward[-1])
