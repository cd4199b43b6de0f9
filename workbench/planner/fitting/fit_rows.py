"""Clean published rows with a step time, as the fit reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import data_files
from workbench.costmodel.compute.kernel_rates import peak_flops
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import plan_constants
from workbench.costmodel.rates.fitted_constants import FittedConstants
from workbench.costmodel.step_time import step_time
from workbench.plan.model.parameter_count import parameters
from workbench.planner.published_steps import MeasuredStep
from workbench.planner.validation.measured_rows import MeasuredRow, read_measured_rows
from workbench.planner.validation.row_consistency import model_flops_per_step
from workbench.planner.validation.row_judgement import published_judgements
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import PlannedRow, row_to_plan

PUBLISHED_ROWS = "data/validation/published.csv.gz"


@dataclass(frozen=True)
class FitRow:
    """One clean row: its plan's workload, and where and how long it was measured."""

    planned: PlannedRow
    workload: Workload
    site: str
    seconds: float

    @property
    def framework(self) -> str:
        """The framework whose versions share one multiplier."""
        return self.planned.profile

    def predicted(self, fitted: FittedConstants) -> float:
        """Seconds of the step with these fitted constants."""
        plan = self.planned.plan
        c = plan_constants(plan, fitted)
        return float(step_time(self.workload, c).seconds)


def fastest_steps(rows: Iterable[FitRow]) -> list[MeasuredStep]:
    """Of a site's rows alike in GPUs, size, sequence, framework and precision, the fastest.

    Those of adapters are left out: without gradients of frozen weights their MFU is another one.
    """
    best: dict[tuple[Any, ...], MeasuredStep] = {}
    for row in rows:
        plan = row.planned.plan
        if plan.lora:
            continue
        done = model_flops_per_step(plan) / (row.seconds * plan.world_size)
        step = MeasuredStep(
            plan.gpu.name,
            plan.world_size,
            float(f"{parameters(plan.shape).active:.3g}"),
            plan.training.sequence_length,
            row.framework,
            plan.strategy.precision,
            round(done / peak_flops(plan.gpu, plan.strategy.precision), 4),
            row.planned.row.label,
            row.site,
        )
        key = (*step.to_list()[:-3], row.site)
        if key not in best or best[key].mfu < step.mfu:
            best[key] = step
    return [best[key] for key in sorted(best)]


def published_rows() -> list[MeasuredRow]:
    """Every row of the committed file."""
    return read_measured_rows(Path(data_files.assets() / PUBLISHED_ROWS))


def clean_rows(rows: Iterable[MeasuredRow], allowed: frozenset[str] = frozenset()) -> list[FitRow]:
    """Rows that ran, with a step time, a site and no flag but those `allowed`; their plans are
    legal.
    """
    judged, found = published_judgements(), []
    for row in rows:
        judgement = judged.get(row.label)
        if judgement is None or set(judgement.flags) - allowed or row.status != "ran":
            continue
        try:
            planned = row_to_plan(row)
        except Inexpressible:
            continue
        if planned.seconds:
            found.append(
                FitRow(planned, workload(planned.plan), judgement.site, float(planned.seconds))
            )
    return found
