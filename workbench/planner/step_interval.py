"""The interval of a plan's step time: nine of ten measured steps lie in it."""

from __future__ import annotations

from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.rates.fitted_constants import measured_profile
from workbench.costmodel.rates.step_uncertainty import StepSituation, step_uncertainty
from workbench.costmodel.step_time import StepTime, step_time, waiting_share
from workbench.machine.calibration_file import read_calibration
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.published_steps import is_measured, octaves_to_measured


def estimated_interval(plan: ResolvedPlan) -> tuple[float, float]:
    """(low, high) seconds of a step of a complete `plan` in nine of ten cases, as it is estimated.

    Raises `PlanError` for what the planner does not model.
    """
    full, k = with_calibration(plan)
    w = planned_workload(full)
    return step_seconds_interval(full, w, step_time(w, k))


def step_seconds_interval(
    plan: ResolvedPlan, w: Workload, time: StepTime, without: str | None = None
) -> tuple[float, float]:
    """(low, high) seconds of a step in nine of ten cases.

    Args:
        plan: A complete plan, whose model is a shape.
        w: Its problem sizes.
        time: Its estimated step time.
        without: A site that the estimate's fit has not seen.
    """
    framework = measured_profile(plan.strategy.stack)
    situation = StepSituation(
        unknown_framework=not is_measured(framework, without),
        waiting=waiting_share(w, time),
        octaves=octaves_to_measured(plan, framework, without),
        after_own_row=_has_own_row(plan),
    )
    low, high = step_uncertainty(without).interval(situation)
    return low * float(time.seconds), high * float(time.seconds)


def _has_own_row(plan: ResolvedPlan) -> bool:
    """Whether a finished run has corrected the plan's calibration."""
    path = plan.cluster.calibration
    scale = read_calibration(path).scale if path is not None else None
    return scale is not None and bool(scale.runs)
