"""The smallest change that makes a plan fit, tried in the order of `plan_changes`."""

from __future__ import annotations

from typing import Any

from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.errors import PlanError
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.framework_limits import stays_possible
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.plan_changes import (
    Change,
    combined_changes,
    larger_gpus,
    more_gpus,
    one_field_changes,
)
from workbench.planner.profiled_models.planned_stages import planned_stages
from workbench.units import GIB


def plan_peak_bytes(full: ResolvedPlan) -> int:
    """Peak memory of a resolved plan: the maximum over its ranks."""
    if full.profiled:
        return round(max(planned_stages(full).peak_bytes))
    here, constants = with_calibration(full)
    return round(float(peak_memory(planned_workload(here), constants).peak.max()))


def first_fitting_change(plan: Plan, full: ResolvedPlan) -> dict[str, Any] | None:
    """The first change that makes a plan fit.

    Changes on the same GPUs come first, of one field before several, then more GPUs, then other
    GPUs. Within each of these, a plan that can run is first offered changes that can run too.

    Args:
        plan: As written.
        full: `plan` resolved.

    Returns:
        `field`, `from` and `to` in words, the `peak_bytes` after the change, and `changes`, which
        `plan.replace` takes. None where no change is found.
    """
    runs = not unsupported(full, "run")
    groups = [
        [*one_field_changes(full), *combined_changes(full)],
        more_gpus(full),
        larger_gpus(full),
    ]
    for candidates in groups:
        for must_run in (True, False) if runs else (False,):
            for change in candidates:
                if found := _fitting(plan, full, change, must_run):
                    return found
    return None


def _fitting(
    plan: Plan, full: ResolvedPlan, change: Change, must_run: bool
) -> dict[str, Any] | None:
    try:
        changed = plan.replace(**change).resolve()
        if (must_run and unsupported(changed, "run")) or not stays_possible(full, changed):
            return None
        peak = plan_peak_bytes(changed)
    except PlanError:
        return None
    if peak > changed.gpu.memory_gib * GIB:
        return None
    before = [_current_value(full, field) for field in change]
    one = len(change) == 1
    return {
        "field": " and ".join(change),
        "from": before[0] if one else ", ".join(map(str, before)),
        "to": next(iter(change.values())) if one else ", ".join(map(str, change.values())),
        "peak_bytes": peak,
        "changes": change,
    }


def _current_value(full: Plan, field: str) -> Any:
    """The present value of a field, GPUs by name."""
    value: Any = full
    for name in field.split("."):
        value = getattr(value, name)
    return value.name if isinstance(value, GPU) else value
