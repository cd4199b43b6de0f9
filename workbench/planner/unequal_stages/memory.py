"""Microbatches that a stage may have in flight: the warm-up policy's, as far as memory allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology

WARM_UPS = ("PA", "PB")
"""DAPPLE's policies: stage i of S starts S - i forwards before its first backward (PA), or
2 (S - i) - 1 (PB), which keeps it busy while transfers, stages of their own, are under way.
"""


def stage_state_bytes(profile: LayerProfile, stage: Stage, batch: Batch) -> float:
    """Parameters, gradients and optimizer state of a stage."""
    size = profile.parameters[stage.end] - profile.parameters[stage.first]
    return size * batch.optimizer_factor


def activation_bytes(profile: LayerProfile, stage: Stage, batch: Batch) -> float:
    """What the busiest replica keeps of one microbatch for backward: its input and all outputs."""
    kept = profile.activations[stage.end] - profile.activations[stage.first]
    kept += profile.crossing[stage.first]
    return kept * batch.activation_factor * batch.of_profile(stage.replicas, profile)


def most_in_flight(profile: LayerProfile, stage: Stage, topology: Topology, batch: Batch) -> int:
    """Microbatches whose activations fit beside the stage's state; 0 where none does."""
    free = topology.memory - stage_state_bytes(profile, stage, batch)
    each = activation_bytes(profile, stage, batch)
    if free < 0:
        return 0
    return batch.microbatches if each * batch.microbatches <= free else math.floor(free / each)


def stages_in_flight(
    profile: LayerProfile, stages: Sequence[Stage], topology: Topology, batch: Batch, warm_up: str
) -> tuple[int, ...] | None:
    """Microbatches in flight by stage, or None where a stage fits none.

    None has more than the stage before it, from which it could not get them.
    """
    found: list[int] = []
    for i, stage in enumerate(stages):
        after = len(stages) - i
        wanted = after if warm_up == "PA" else 2 * after - 1
        found.append(min(wanted, most_in_flight(profile, stage, topology, batch), *found[-1:]))
    return tuple(found) if found[-1] else None


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
    return max(
        stage_state_bytes(profile, stage, batch)
        + min(count, batch.microbatches) * activation_bytes(profile, stage, batch)
        for stage, count in zip(stages, held)
    )
