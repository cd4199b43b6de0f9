"""The planner's answer for one plan in three numbers, by the same functions as `estimate`, without
its frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.memory.reported_memory import (
    Z_95,
    ReportedMemory,
    bounds_of_kind,
    peak_memory_sigma,
    reported_memory,
    reported_memory_interval,
)
from workbench.costmodel.rates.constants import plan_constants
from workbench.costmodel.rates.fitted_constants import fit_without
from workbench.costmodel.rates.fitted_memory import MemoryFit, published_memory_fit
from workbench.costmodel.rates.step_uncertainty import is_well_known
from workbench.costmodel.step_time import step_time, step_time_breakdown
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.step_interval import step_seconds_interval
from workbench.planner.validation.implied_fields.first_step_readings import reads_first_step
from workbench.planner.validation.measured_rows import MeasuredRow
from workbench.units import GIB


@dataclass(frozen=True)
class Prediction:
    """What the planner says of one plan: peak GiB, seconds of a step, and 5 % and 95
    % bounds.
    """

    peak_gib: float
    """Peak memory of the GPU with the most."""
    seconds: float | None
    peak_low: float | None = None
    peak_high: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    reported: ReportedMemory | None = None
    """What makes up the readings of tools."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of the step, and GiB by category at the peak."""


Predict = Callable[[ResolvedPlan], Prediction]


@dataclass(frozen=True)
class LeftOut:
    """Step time of a published row from the fit that has not seen its site, with 5 % and 95 %
    bounds.
    """

    seconds: float
    low: float
    high: float
    well_known: bool
    """Whether the framework was measured at three other sites or more."""


def predict_left_out(plan: ResolvedPlan, site: str) -> LeftOut:
    """What the fit without `site` says of a complete `plan`.

    Raises `PlanError` for what the planner does not model.
    """
    w, stack = workload(plan), plan.strategy.stack
    time = step_time(w, plan_constants(plan, fit_without(site)))
    low, high = step_seconds_interval(plan, w, time, site)
    return LeftOut(float(time.seconds), low, high, is_well_known(stack, site))


def predict(plan: ResolvedPlan) -> Prediction:
    """What the planner says of a complete `plan`. Raises `PlanError` for what it does not model."""
    full, constants = with_calibration(plan)
    w = workload(full)
    live, time = peak_memory(w, constants), step_time(w, constants)
    low, high = step_seconds_interval(full, w, time)
    peak_rank = int(np.argmax(live.peak))
    sizes = {
        name: float(np.ravel(size)[peak_rank]) / GIB for name, size in live.moments["peak"].items()
    }
    times = {f"{name} s": seconds for name, seconds in step_time_breakdown(w, time).items()}
    peak, deviation = sum(sizes.values()), Z_95 * peak_memory_sigma(plan.strategy.stack)
    return Prediction(
        peak_gib=peak,
        peak_low=peak * math.exp(-deviation),
        peak_high=peak * math.exp(deviation),
        seconds=float(time.seconds),
        seconds_low=low,
        seconds_high=high,
        reported=reported_memory(w, live, constants),
        parts={**times, **{f"{name} GiB": size for name, size in sizes.items() if size}},
    )


@dataclass(frozen=True)
class ExpectedReading:
    """A reading, GiB."""

    least: float
    """What the lowest kind that it can be would show: the reading itself where its kind is known,
    else allocated memory.
    """
    most: float
    """The same of the highest kind, reserved memory."""
    likely: float
    """What the highest kind would show where no freed block waits for another stream."""
    low: float
    """5 % bound."""
    high: float
    """95 % bound."""


def expected_reading(
    row: MeasuredRow, p: Prediction, profile: str = "", fit: MemoryFit | None = None
) -> ExpectedReading | None:
    """What `row`'s way of reading should show of the plan that `p` predicts; None where a
    prediction has no readings.

    Args:
        row: The row; its own reading is not looked at.
        p: The prediction of its plan.
        profile: Framework profile that the row names, for the interval.
        fit: Fit to readings; None: the published one.
    """
    if p.reported is None:
        return None
    fit = published_memory_fit() if fit is None else fit
    low, _, high = reported_memory_interval(profile, fit)
    lowest, highest = bounds_of_kind(row.memory_kind)
    reported = p.reported.in_first_step() if reads_first_step(row.source, row.model) else p.reported

    def shown(kind: str, factor: float = 1.0, waiting: float = 1.0) -> float:
        stages = reported.readings(fit.slack, factor, waiting)[kind]
        return float((stages[0] if row.memory_of_first_stage else stages.max()) / GIB)

    return ExpectedReading(
        least=shown(lowest),
        most=shown(highest),
        likely=shown(highest, waiting=0.0),
        low=shown(lowest, low),
        high=shown(highest, high),
    )
