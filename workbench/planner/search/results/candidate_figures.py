"""What is said of the few candidates that a search returns: risk, slow-down, MFU, what was
published.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

from workbench.costmodel.compute.kernel_rates import peak_flops
from workbench.costmodel.compute.roofline import model_flops
from workbench.costmodel.memory.near_full import near_full_slowdown
from workbench.costmodel.memory.reported_memory import probability_of_running_out
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.fitted_constants import measured_profile
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.published_steps import published_beside
from workbench.planner.search.results.pareto_front import RankedCandidate
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.search_space import SearchSpace, candidate_plan
from workbench.units import GIB


class Figures(Protocol):
    """What is said of the candidates of one search."""

    largest_peak_bytes: float
    """That a candidate may have."""

    def candidate(
        self, plan: Plan, seconds: float, peak: float, score: float, **more: Any
    ) -> Candidate:
        """A plan of the space with what is said of it; `more` is of its kind of search."""

    def slowdown(self, peak: float) -> float:
        """Expected multiple of the step time by the allocator's retries."""


class ProfileFigures:
    """Of plans on a layer profile, of which neither FLOPs nor what the allocator does are known."""

    def __init__(self, space: SearchSpace) -> None:
        self.tokens = space.batch * space.base.training.sequence_length
        self.largest_peak_bytes = float(int(space.base.gpu.memory_gib * GIB))

    def candidate(
        self, plan: Plan, seconds: float, peak: float, score: float, **more: Any
    ) -> Candidate:
        """A plan of the space with what is said of it; `more` is of its kind of search."""
        unknown: dict[str, Any] = {"risk": None, "mfu": None}
        return Candidate(plan, seconds, peak, score, self.tokens, **unknown, **more)

    def slowdown(self, peak: float) -> float:
        """None is known."""
        return 1.0


class CandidateFigures:
    """Of the candidates of one search: what they share is computed once."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.stack = space, space.base.strategy.stack
        self.largest_peak_bytes = space.largest_peak_bytes
        self.capacity = space.base.gpu.memory_gib * GIB
        self._flops: float | None = None
        self._published: dict[int, dict[str, Any]] = {}

    def candidate(
        self, plan: Plan, seconds: float, peak: float, score: float, **more: Any
    ) -> Candidate:
        """A plan of the space with what is said of it; `more` is of its kind of search."""
        gpus = plan.world_size
        return Candidate(
            plan,
            seconds,
            peak,
            score,
            step_tokens=self.space.batch * self.space.base.training.sequence_length,
            risk=self.risk(peak),
            slowdown=self.slowdown(peak),
            mfu=self.utilization(plan, seconds, gpus),
            published=self.published(gpus),
            **more,
        )

    def of(self, found: RankedCandidate) -> Candidate:
        """A candidate of a cell that was kept."""
        plan = candidate_plan(self.space, found.cell.choice(found.candidate_index))
        return self.candidate(plan, found.seconds, found.peak, found.score)

    @cached_property
    def constants(self) -> Constants:
        """Of the GPU and the framework."""
        return with_calibration(self.space.base)[1]

    def risk(self, peak: float) -> float:
        """Probability of running out of memory at a predicted peak, bytes."""
        return probability_of_running_out(peak, self.capacity, self.stack)

    def slowdown(self, peak: float) -> float:
        """Expected multiple of the step time by the allocator's retries."""
        return near_full_slowdown(peak, self.capacity, self.stack, self.constants)

    def utilization(self, plan: Plan, seconds: float, gpus: int) -> float:
        """Model FLOPs utilization of a step. Its FLOPs are those of any candidate: they all train
        the same batch.
        """
        if self._flops is None:
            w = planned_workload(plan.resolve())
            ranks = w.tensor * w.searched.context
            self._flops = float(model_flops(w) * w.step_microbatches * ranks)
        setting = self.space.fixed_configs[0]
        return self._flops / (seconds * gpus * peak_flops(setting.gpu, setting.precision))

    def published(self, gpus: int) -> dict[str, Any]:
        """What was published near the model on so many GPUs."""
        if gpus not in self._published:
            found = published_beside(self.space.base, measured_profile(self.stack), gpus)
            self._published[gpus] = found
        return self._published[gpus]
