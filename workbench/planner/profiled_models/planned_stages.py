"""The stages of a plan whose model is a layer profile: on which devices they are, what a microbatch
of them takes and keeps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.rank_placement import rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import stages_in_flight
from workbench.plan.stage_replicas import Part, even_parts
from workbench.planner.unequal_stages.cluster_topology import cluster_topology
from workbench.planner.unequal_stages.memory import (
    activation_bytes,
    backward_bytes,
    stage_state_bytes,
)
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.stage_times import Batch, Stage, StageTimes, stage_times
from workbench.planner.unequal_stages.topology import Topology


@dataclass(frozen=True)
class PlannedStages:
    """Stages of a complete plan."""

    profile: LayerProfile
    topology: Topology
    batch: Batch
    stages: tuple[Stage, ...]
    in_flight: tuple[int, ...]
    """Microbatches by stage, all of them under GPipe."""
    keeps_all: bool
    """Whether the schedule is GPipe."""

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of a microbatch of every stage and transfer."""
        return stage_times(self.profile, self.stages, self.topology, self.batch)

    @cached_property
    def parts(self) -> list[list[Part]]:
        """Sequences of a microbatch by stage and replica, the first with most."""
        return [even_parts(self.batch.sequences, stage.replicas) for stage in self.stages]

    def share(self, stage: int, replica: int) -> float:
        """How much a replica does over what the busiest of its stage does."""
        sizes = [stop - start for start, stop in self.parts[stage]]
        return sizes[replica] / sizes[0]

    def activations(self, stage: int) -> float:
        """Bytes that the busiest replica of a stage keeps of all microbatches in flight."""
        each = activation_bytes(self.profile, self.stages[stage], self.batch)
        return self.in_flight[stage] * float(each)

    def temporary(self, stage: int) -> float:
        """Bytes that the busiest replica of a stage needs in backward beside those."""
        return float(backward_bytes(self.profile, self.stages[stage], self.batch))

    @property
    def peak_bytes(self) -> list[float]:
        """Largest memory of a device of each stage."""
        states = [float(stage_state_bytes(self.profile, s, self.batch)) for s in self.stages]
        return [
            state + self.activations(stage) + self.temporary(stage)
            for stage, state in enumerate(states)
        ]

    def parameter_bytes(self, stage: Stage) -> float:
        """Bytes of a stage's parameters."""
        return float(stage_parameter_bytes(self.profile, stage.first, stage.end))


def planned_stages(plan: ResolvedPlan) -> PlannedStages:
    """The stages of a complete plan whose model is a layer profile. Raises `PlanError` where it is
    none.
    """
    profile, p, batch = plan.layer_profile, plan.strategy.pipeline, plan_batch(plan)
    topology = cluster_topology(plan)
    on_node = Counter(
        (rank_place(plan, rank).stage, rank // topology.devices) for rank in range(plan.world_size)
    )
    ends = [0, *accumulate(p.partition)]
    stages = tuple(
        Stage(first, end, tuple(on_node[stage, node] for node in range(topology.nodes)))
        for stage, (first, end) in enumerate(pairwise(ends))
    )
    held = stages_in_flight(plan)
    keeps_all = held is None and p.size > 1
    wanted = [batch.microbatches] * p.size if keeps_all else held or [1]
    in_flight = tuple(min(count, batch.microbatches) for count in wanted)
    return PlannedStages(profile, topology, batch, stages, in_flight, keeps_all)


def plan_batch(plan: ResolvedPlan) -> Batch:
    """What a step of a complete plan on a layer profile trains on, all replicas of a stage
    together, and what a device keeps of it.
    """
    bytes_of = state_bytes(plan)
    each = bytes_of.parameter + bytes_of.gradient + bytes_of.optimizer
    return Batch(
        plan.num_microbatches,
        plan.task.micro_batch * plan.sizes["data"],
        optimizer_factor=each / bytes_of.parameter,
        gradient_factor=bytes_of.gradient / bytes_of.parameter,
    )
