"""Microbatches that a stage may have in flight: the warm-up policy's, as far as memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.stage_times import Batch, Cut, Stage, cuts
from workbench.planner.unequal_stages.topology import Floats, Ints, Topology

WARM_UPS = ("PA", "PB")
"""DAPPLE's policies: stage i of S starts S - i forwards before its first backward (PA), or
2 (S - i) - 1 (PB), which keeps it busy while transfers, stages of their own, are under way.
"""


def stage_state_bytes(profile: LayerProfile, stage: Cut, batch: Batch) -> Floats:
    """Parameters, gradients and optimizer state of a replica of a stage."""
    each = batch.optimizer_factor + batch.sharded_factor / np.asarray(stage.replicas)
    found: Floats = stage_parameter_bytes(profile, stage.first, stage.end) * each
    return found


def activation_bytes(profile: LayerProfile, stage: Cut, batch: Batch) -> Floats:
    """What the busiest replica keeps of one microbatch for backward."""
    sums = np.array(profile.kept)
    kept = sums[stage.end] - sums[stage.first] + np.array(profile.kept_input)[stage.first]
    found: Floats = kept * batch.activation_factor * batch.of_profile(stage.replicas, profile)
    return found


def backward_bytes(profile: LayerProfile, stage: Cut, batch: Batch) -> Floats:
    """What the busiest replica needs at the peak of a backward beside all that it keeps."""
    sums, peaks = np.array(profile.kept), np.array(profile.backward_peaks)
    if not profile.ties and (peaks == sums[1:]).all():  # a search asks often
        return np.zeros(())
    first, end = np.broadcast_arrays(stage.first, stage.end)
    most = np.zeros(first.shape)
    for start in np.unique(stage.first):
        own = first == start
        most[own] = np.maximum.accumulate(peaks[start:])[end[own] - start - 1]
    for tie in profile.ties:  # the later layer's gradient waits for the earlier's, to be summed
        waiting, summed = peaks[tie.earlier : tie.layer].max(), peaks[tie.earlier] + tie.bytes
        both = (first <= tie.earlier) & (tie.layer < end)
        most = np.maximum(most, both * (max(waiting, summed) + tie.bytes))
    beside = np.maximum(0.0, most - sums[end]) * batch.activation_factor
    found: Floats = beside * batch.of_profile(stage.replicas, profile)
    return found


def most_in_flight(profile: LayerProfile, stage: Cut, topology: Topology, batch: Batch) -> Ints:
    """Microbatches whose activations fit beside the stage's state; 0 where none does."""
    beside = stage_state_bytes(profile, stage, batch) + backward_bytes(profile, stage, batch)
    free = topology.memory - beside
    each = activation_bytes(profile, stage, batch)
    most = np.full_like(each, batch.microbatches)
    fitting = np.divide(free, each, out=most, where=each * batch.microbatches > free)
    found: Ints = np.where(free < 0, 0, fitting).astype(np.int64)
    return found


def policy_in_flight(stages: int, warm_up: str) -> tuple[int, ...]:
    """Microbatches in flight by stage that a warm-up policy wants."""
    after = range(stages, 0, -1)
    return tuple(after if warm_up == "PA" else (2 * k - 1 for k in after))


def stages_in_flight(
    profile: LayerProfile, stages: Sequence[Stage], topology: Topology, batch: Batch, warm_up: str
) -> tuple[int, ...] | None:
    """Microbatches in flight by stage, or None where a stage fits none.

    None has more than the stage before it, from which it could not get them.
    """
    wanted = policy_in_flight(len(stages), warm_up)
    fitting = most_in_flight(profile, cuts(stages), topology, batch)
    found = np.minimum.accumulate(np.minimum(wanted, fitting))
    return tuple(found.tolist()) if found[-1] else None


def with_transfers(stages: Sequence[int]) -> tuple[int, ...]:
    """Microbatches in flight of stages and of the transfers between them.

    A transfer has between what the stages at its two ends have; one fewer than the stage before it
    gives PB the 1F1B of twice as many stages.
    """
    found = [stages[0]]
    for before, after in pairwise(stages):
        found += [max(after, before - 1), after]
    return tuple(found)


def peak_bytes(
    profile: LayerProfile, stages: Sequence[Stage], held: Sequence[int], batch: Batch
) -> float:
    """Largest memory of a device, `held` microbatches in flight by stage."""
    each = activation_bytes(profile, cuts(stages), batch)
    kept = np.minimum(held, batch.microbatches) * each
    every = cuts(stages)
    beside = stage_state_bytes(profile, every, batch) + backward_bytes(profile, every, batch)
    return float((beside + kept).max())
