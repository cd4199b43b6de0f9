"""Stages of a combination, and what a plan says of them."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.rules.strategy.stage_rules import has_own_stages
from workbench.planner.search.unequal.combinations import Combination
from workbench.planner.unequal_stages.memory import policy_in_flight
from workbench.planner.unequal_stages.plan import UnequalPlan


@dataclass(frozen=True)
class StagedPlan:
    """Stages of all ranks."""

    combination: Combination
    stages: UnequalPlan

    @property
    def seconds(self) -> float:
        """Of a step, by the latency model."""
        return self.stages.seconds

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most."""
        layers = self.combination.layers
        return self.stages.memory + layers.temporary + layers.fixed

    @property
    def replicas(self) -> list[int] | None:
        """Of each stage; None where they are the data-parallel ranks of a plan."""
        counts = self.stages.replicas
        alike = len(set(counts)) == 1 and self.combination.sequences % counts[0] == 0
        return None if alike else list(counts)

    @property
    def in_flight(self) -> list[int] | None:
        """Microbatches of each stage; None where they are those of the schedule."""
        held, count = self.stages.in_flight, self.combination.microbatches
        usual = policy_in_flight(len(held), self.stages.warm_up)
        fewer = any(k < min(most, count) for k, most in zip(held, usual))
        return list(held) if fewer and len(held) > 1 else None

    @property
    def sayable(self) -> bool:
        """Whether the plan's framework has such stages, wherever they are."""
        own = self.replicas is not None or self.in_flight is not None
        return has_own_stages(self.combination.stack) or not own
