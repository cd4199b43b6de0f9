"""Seconds of each stage of an unequally replicated pipeline, from a layer profile.

A transfer between two stages is a stage of its own, as in DAPPLE (2007.01045): stages 0, 2, 4 ...
of the result compute, 1, 3, 5 ... transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.topology import Counts, Topology


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
    """Bytes kept for backward for each byte that a layer puts out."""

    def takes(self, replicas: int) -> bool:
        """Whether each of `replicas` has something to do."""
        return not self.whole_sequences or replicas <= self.sequences

    def of_profile(self, replicas: int, profile: LayerProfile) -> float:
        """How much of a profiled pass the busiest of `replicas` does for one microbatch."""
        part = self.sequences / replicas
        return (math.ceil(part) if self.whole_sequences else part) / profile.profile_batch


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a microbatch by stage, transfers in between; of an all-reduce, 0 for a
    transfer.
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
    forward: list[float] = []
    backward: list[float] = []
    reduced: list[float] = []
    for before, stage in zip([None, *stages[:-1]], stages):
        if before is not None:
            seconds = transfer_seconds(profile, before, stage, topology, batch)
            forward.append(seconds)
            backward.append(seconds)  # the gradient of an activation is as large
            reduced.append(0.0)
        part = batch.of_profile(stage.replicas, profile)
        forward.append(part * (profile.forward[stage.end] - profile.forward[stage.first]))
        backward.append(part * (profile.backward[stage.end] - profile.backward[stage.first]))
        size = profile.parameters[stage.end] - profile.parameters[stage.first]
        reduced.append(size * topology.all_reduce_per_byte(stage.counts))
    return StageTimes(tuple(forward), tuple(backward), tuple(reduced))


def transfer_seconds(
    profile: LayerProfile, before: Stage, after: Stage, topology: Topology, batch: Batch
) -> float:
    """Seconds that one microbatch's activations take between two stages."""
    size = profile.crossing[after.first] * batch.sequences / profile.profile_batch
    return size * topology.transfer_per_byte(before.counts, after.counts)


def one_device_seconds(profile: LayerProfile, batch: Batch) -> float:
    """Seconds of a step's compute on one device, of which a speed-up counts."""
    passes = batch.microbatches * batch.sequences / profile.profile_batch
    return passes * (profile.forward[-1] + profile.backward[-1])
