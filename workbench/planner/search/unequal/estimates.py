"""The plans of stages, estimated and held against conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.step_time import longest_compute_seconds, step_time
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.framework_limits import broken_limits
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.plan_conditions import Condition
from workbench.planner.profiled_models.planned_stages import planned_stages
from workbench.planner.profiled_models.step_seconds import step_seconds
from workbench.planner.search.results.candidate_figures import Figures
from workbench.planner.search.results.search_result import Candidate
from workbench.planner.search.results.stage_figures import StageFigures
from workbench.planner.search.search_space import SearchSpace
from workbench.planner.search.space_scan import objective_score
from workbench.planner.search.unequal.staged_plan import StagedPlan
from workbench.planner.search.unequal.written_plans import plans_of
from workbench.units import GIB


class Estimates:
    """The plans of stages that meet the conditions on results, estimated."""

    def __init__(
        self, space: SearchSpace, beside: Figures, objective: str, conditions: Sequence[Condition]
    ) -> None:
        self.space, self.beside, self.objective = space, beside, objective
        self.conditions = conditions
        self.found: list[tuple[Candidate, StagedPlan]] = []

    def take(
        self, plans: Sequence[StagedPlan], one_gpu: float, progress: Callable[[str], None]
    ) -> None:
        """Estimate `plans`; a step's compute takes `one_gpu` seconds on one GPU."""
        for done, staged in enumerate(plans):
            progress(f"estimating, {done} of {len(plans)} plans")
            for plan in plans_of(self.space, staged):
                one = self._candidate(plan, staged, one_gpu)
                if one and all(c.holds(result_of(one, c.field)) for c in self.conditions):
                    self.found.append((one, staged))

    def least_seconds(self, staged: StagedPlan) -> float:
        """Of the plans of some stages; infinite where none is one."""
        known = (self._candidate(plan, staged, 0.0) for plan in plans_of(self.space, staged))
        return min((one.seconds for one in known if one), default=math.inf)

    def _candidate(self, plan: Plan, staged: StagedPlan, one_gpu: float) -> Candidate | None:
        """The plan with its estimate; None where it is illegal, not within the risk, or more than
        the framework can do.
        """
        try:
            full = plan.resolve()
            seconds, compute, peak = estimated_figures(full)
        except PlanError:
            return None
        if peak > self.beside.largest_peak_bytes or broken_limits(full):
            return None
        expected = np.array(seconds * self.beside.slowdown(peak))
        setting = staged.combination.setting
        score = objective_score(setting, self.objective, expected, np.array(compute))
        figures = StageFigures(
            staged.combination.microbatches,
            staged.seconds,
            staged.stages.times.activation_communication_ratio,
            one_gpu / seconds,
        )
        return self.beside.candidate(plan, seconds, peak, float(score), stages=figures)


def estimated_figures(full: ResolvedPlan) -> tuple[float, float, float]:
    """(seconds of a step, those in which the busiest rank computes, largest peak in bytes)."""
    if full.profiled:
        planned = planned_stages(full)
        took = step_seconds(planned, full.strategy.data.overlap)
        return took.simulated, took.parts["compute"], max(planned.peak_bytes)
    calibrated, constants = with_calibration(full)
    w = planned_workload(calibrated)
    time = step_time(w, constants)
    compute, peak = longest_compute_seconds(w, time), peak_memory(w, constants).peak
    return float(time.seconds), float(compute), float(peak.max())


def result_of(one: Candidate, field: str) -> float:
    if field == "peak_gib":
        return one.peak_bytes / GIB
    if field == "tokens_per_second":
        return one.step_tokens / one.seconds
    return one.expected_seconds if field == "expected_seconds" else one.seconds
