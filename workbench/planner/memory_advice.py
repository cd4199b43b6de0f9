"""The smallest change that makes a plan fit, tried in the order of `plan_changes`."""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.costmodel.memory.live_sets.stage_phases import total_bytes
from workbench.costmodel.memory.peak_memory import PeakMemory, peak_memory
from workbench.costmodel.memory.reported_memory import probability_of_running_out
from workbench.errors import PlanError
from workbench.machine.hardware import GPU
from workbench.plan.operators.traced.traced_json import TracedModel
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan, written_fields
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.framework_limits import stays_possible
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.operator_plans.traced_plan import with_traced
from workbench.planner.plan_changes import (
    Change,
    combined_changes,
    larger_gpus,
    more_gpus,
    one_field_changes,
)
from workbench.planner.profiled_models.planned_stages import planned_stages
from workbench.units import GIB

HOPELESS = 2.0
"""Times the memory of a GPU that a plan needs at least, for its buckets not to be packed: they
change a peak by some percent.
"""


class PlannedMemory(NamedTuple):
    """Bytes of the rank that needs most, and what it has."""

    peak_bytes: int
    capacity_bytes: int
    host_bytes: int
    """In host memory."""
    host_capacity_bytes: int | None
    """A rank's share of its node's host memory; None: not known."""
    runs_out: float
    """Probability that the GPU runs out of memory; of a layer profile whether it does."""

    @property
    def exceeds_host(self) -> bool:
        """Whether the host does not hold what is offloaded."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the GPU holds its part, and the host the other."""
        return self.peak_bytes <= self.capacity_bytes and not self.exceeds_host


def planned_memory(full: ResolvedPlan, model: TracedModel | None = None) -> PlannedMemory:
    """Memory of a resolved plan on device and host: the maximum over its ranks; `model` is its
    module, traced, where it is code.
    """
    if full.profiled:
        capacity = int(full.gpu.memory_gib * GIB)
        peak = round(max(planned_stages(full).peak_bytes))
        return PlannedMemory(peak, capacity, 0, None, float(peak > capacity))
    shaped, traced = with_traced(full, model)
    here, constants = with_calibration(shaped)
    return beside_capacity(peak_memory(planned_workload(here, traced=traced), constants), full)


def beside_capacity(found: PeakMemory, full: ResolvedPlan) -> PlannedMemory:
    """What a plan needs beside what its GPUs and hosts have."""
    peak, host = (
        round(float(each.max())) for each in (found.peak, total_bytes(found.beyond.get("host", {})))
    )
    capacity, stack = int(full.gpu.memory_gib * GIB), full.strategy.stack
    runs_out = probability_of_running_out(peak, capacity, stack)
    return PlannedMemory(peak, capacity, host, full.host_capacity_bytes, runs_out)


def plan_peak_bytes(full: ResolvedPlan, model: TracedModel | None = None) -> int:
    """Peak memory of a resolved plan: the maximum over its ranks; arguments as `planned_memory`."""
    return planned_memory(full, model).peak_bytes


def first_fitting_change(plan: Plan, full: ResolvedPlan) -> dict[str, Any] | None:
    """The first change that makes a plan fit.

    Changes on the same GPUs come first, of one field before several, and last of them the strategy
    that needs the least memory of all that `search` knows; then more GPUs, then other GPUs, of the
    same vendor first. Within each of these, a plan that can run is first offered changes that can
    run too.

    Args:
        plan: As written.
        full: `plan` resolved.

    Returns:
        `field`, `from` and `to` in words, the `peak_bytes` after the change, and `changes`, which
        `plan.replace` takes. None where no change is found.
    """
    runs = not unsupported(full, "run")
    groups = (
        lambda: [*one_field_changes(full), *combined_changes(full)],
        lambda: _least_memory_change(plan, full),
        lambda: more_gpus(full),
        lambda: larger_gpus(full),
    )
    for candidates in groups:
        changes = candidates()
        for must_run in (True, False) if runs else (False,):
            for change in changes:
                if found := _fitting(plan, full, change, must_run):
                    return found
    return None


def _least_memory_change(plan: Plan, full: ResolvedPlan) -> list[Change]:
    """The strategy of least memory on these GPUs; none of a plan that no search goes through."""
    if full.profiled or full.code:
        return []
    # Imported here: the search is much code, which a plan that fits does not load.
    from workbench.planner.search.least_memory import least_memory_plan

    least = least_memory_plan(plan)
    if least is None:
        return []
    now, then = full.training, least.training
    change: Change = {"strategy": written_fields(least)["strategy"]}
    if then.global_batch != now.global_batch:
        change["training.global_batch"] = then.global_batch
    if then.micro_batch != now.micro_batch:
        change["training.micro_batch"] = then.micro_batch
    return [change]


def _fitting(
    plan: Plan, full: ResolvedPlan, change: Change, must_run: bool
) -> dict[str, Any] | None:
    try:
        changed = plan.replace(**change).resolve()
        if (must_run and unsupported(changed, "run")) or not stays_possible(full, changed):
            return None
        if _is_hopeless(changed):
            return None
        memory = planned_memory(changed)
    except PlanError:
        return None
    return _advice(full, changed, change, memory) if memory.fits else None


def _is_hopeless(full: ResolvedPlan) -> bool:
    """True where a plan needs more than twice what its GPUs have, before any tensor is packed."""
    if full.profiled or full.code:
        return False
    here, constants = with_calibration(full)
    found = peak_memory(planned_workload(here, packed=False), constants)
    return float(found.peak.max()) > HOPELESS * full.gpu.memory_gib * GIB


def _advice(
    full: ResolvedPlan, changed: ResolvedPlan, change: Change, memory: PlannedMemory
) -> dict[str, Any]:
    before, after = [_current_value(full, field) for field in change], list(change.values())
    one, fields = len(change) == 1, " and ".join(change)
    if "strategy" in change:
        from workbench.planner.search.results.strategy_summary import strategy_summary

        one, fields = True, "strategy"  # all of it, said in a few words with the micro-batch
        before, after = [strategy_summary(full)], [strategy_summary(changed)]
    return {
        "field": fields,
        "from": before[0] if one else ", ".join(map(str, before)),
        "to": after[0] if one else ", ".join(map(str, after)),
        "peak_bytes": memory.peak_bytes,
        "changes": change,
    }


def _current_value(full: Plan, field: str) -> Any:
    """The present value of a field, GPUs by name."""
    value: Any = full
    for name in field.split("."):
        value = getattr(value, name)
    return value.name if isinstance(value, GPU) else value
