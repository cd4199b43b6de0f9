"""All-reduces of a single stage, layer by layer beside its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.stage_times import Batch, Stage, StageTimes
from workbench.planner.unequal_stages.topology import Topology


def with_overlap(
    times: StageTimes,
    profile: LayerProfile,
    stages: Sequence[Stage],
    topology: Topology,
    batch: Batch,
) -> StageTimes:
    """`times` where the only stage all-reduces a layer's gradients while those before it run
    backward; those of several stages, whose all-reduces wait for the stage's last backward.
    """
    if len(stages) > 1:
        return times
    part = float(batch.passes_of(stages[0].replicas, profile))
    per_byte = float(topology.all_reduce_per_byte(stages[0].counts))
    exposed = exposed_all_reduce(profile, part, batch.gradient_factor * per_byte)
    return replace(times, all_reduce=(exposed,))


def exposed_all_reduce(profile: LayerProfile, part: float, per_byte: float) -> float:
    """Seconds of all-reduces after the last backward of all layers, of which each starts as soon
    as its layer has run backward, one after the other.

    Args:
        profile: The layers.
        part: Profiled passes of that backward.
        per_byte: Seconds of an all-reduce for each byte of parameters.
    """
    now = reduced = 0.0
    for layer in reversed(profile.layers):
        now += part * layer.backward_s
        if layer.parameter_bytes:
            reduced = max(reduced, now) + per_byte * layer.parameter_bytes
    return max(0.0, reduced - now)
