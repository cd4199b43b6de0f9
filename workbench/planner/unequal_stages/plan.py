"""A pipeline of unequally replicated stages and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.latency import latency
from workbench.planner.unequal_stages.memory import (
    WARM_UPS,
    peak_bytes,
    stages_in_flight,
    with_transfers,
)
from workbench.planner.unequal_stages.overlapped_all_reduce import with_overlap
from workbench.planner.unequal_stages.simulated import simulated
from workbench.planner.unequal_stages.stage_times import (
    Batch,
    Stage,
    StageTimes,
    one_device_seconds,
    stage_times,
)
from workbench.planner.unequal_stages.topology import Topology

Policies = Callable[[int], Sequence[str]]
"""Number of stages -> warm-up policies that a plan of so many may have."""


@dataclass(frozen=True)
class UnequalPlan:
    """Stages, the warm-up policy that is faster for them, and seconds of a step."""

    stages: tuple[Stage, ...]
    warm_up: str
    in_flight: tuple[int, ...]
    """Microbatches by stage."""
    times: StageTimes
    seconds: float
    """In closed form."""
    memory: float
    """Bytes of the device that needs most."""
    batch: Batch
    one_device: float
    """Seconds of the compute on one device."""

    @cached_property
    def simulated(self) -> float:
        """Seconds of a step by the simulator."""
        held = with_transfers(self.in_flight)
        return simulated(self.times, held, self.batch.microbatches).makespan

    @property
    def replicas(self) -> tuple[int, ...]:
        """Devices by stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def speed_up(self) -> float:
        """Over one device, by the simulator."""
        return self.one_device / self.simulated


def all_policies(stages: int) -> Sequence[str]:
    """The warm-up policies of a pipeline of so many stages."""
    return WARM_UPS if stages > 1 else WARM_UPS[:1]


def evaluate(
    profile: LayerProfile,
    stages: Sequence[Stage],
    topology: Topology,
    batch: Batch,
    policies: Sequence[str] = WARM_UPS,
) -> UnequalPlan | None:
    """The plan of `stages` with the fastest warm-up policy, PA where they are equal since it keeps
    less; None where a stage fits no microbatch, or has more replicas than that has sequences. The
    all-reduces of a single stage overlap its backward.
    """
    if not batch.takes(np.array([stage.replicas for stage in stages])).all():
        return None
    times = stage_times(profile, stages, topology, batch)
    times = with_overlap(times, profile, stages, topology, batch)
    found: list[UnequalPlan] = []
    for warm_up in policies:
        held = stages_in_flight(profile, stages, topology, batch, warm_up)
        if held is None:
            return None
        seconds = latency(times, with_transfers(held), batch.microbatches).seconds
        memory = peak_bytes(profile, stages, held, batch)
        one = one_device_seconds(profile, batch)
        found.append(UnequalPlan(tuple(stages), warm_up, held, times, seconds, memory, batch, one))
    return min(found, key=lambda plan: plan.seconds, default=None)
