"""Schedules with several stages a rank, or with split backwards, whose stages are equal: one
estimate for each of the strategies worth trying, with as few layers recomputed as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.planner.search.joint.choice_search import fits_text
from workbench.planner.search.joint.joint_plans import with_tied_table
from workbench.planner.search.joint.stage_choices import Strategies
from workbench.planner.search.joint.stage_estimates import Stage, StageEstimates


@dataclass(frozen=True)
class EqualStages:
    """Stages of a schedule with what the estimate says of their step."""

    stages: tuple[Stage, ...]
    seconds: float
    peak: float
    """Largest bytes of any rank."""

    def reason(self, memory: float) -> str:
        """Why the stages have these layers."""
        again, layers = (
            sum(getattr(stage, name) for stage in self.stages) for name in ("recomputed", "layers")
        )
        equal = f"{len(self.stages)} stages of equal layers; {again} of {layers} recomputed"
        return f"{equal}, {fits_text(self.peak, memory)}"


@dataclass
class EqualDivision:
    """Plans of one choice with equal stages.

    Args:
        estimates: Of the choice and its schedule.
        partition: Layers of each stage.
        recomputes: Whether layers may be recomputed.
    """

    estimates: StageEstimates
    partition: Sequence[int]
    recomputes: bool = True

    def within(
        self, variants: Sequence[Sequence[Strategies]], memory: float, least: float
    ) -> Iterator[EqualStages]:
        """Those within `memory` bytes whose step may take less than `least` seconds: without
        recomputation, else with as little as fits. Several may be worth keeping, for the fastest
        may fill a GPU so far that it is slower.
        """
        for variant in variants:
            plain = self.recomputing(variant, 0)
            if plain.seconds >= least:
                continue
            if plain.peak <= memory:
                yield plain
            elif self.recomputes and (found := self._fewest(variant, memory)):
                yield found

    def _fewest(self, variant: Sequence[Strategies], memory: float) -> EqualStages | None:
        """With as few layers of each stage recomputed as fit."""
        low, high = 0, max(self.partition)
        found = self.recomputing(variant, high)
        if found.peak > memory:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            one = self.recomputing(variant, middle)
            low, high = (low, middle) if one.peak <= memory else (middle, high)
            found = one if one.peak <= memory else found
        return found

    def recomputing(self, variant: Sequence[Strategies], layers: int) -> EqualStages:
        """With up to so many layers of each stage recomputed."""
        stages = tuple(
            Stage(count, own, min(layers, count)) for count, own in zip(self.partition, variant)
        )
        if self.estimates.plan.shape.tied and self.estimates.ranks > 1:
            stages = with_tied_table(stages)
        return EqualStages(stages, *self.estimates.step(stages))
