"""What a plan will cost, in closed form and milliseconds: the planner's whole answer as a
Profile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_volume import exact_collectives, step_collectives
from workbench.costmodel.compute.kernel_benchmarks import kernel_cost_source
from workbench.costmodel.compute.roofline import host_gbs
from workbench.costmodel.cpu_seconds import cpu_seconds
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.near_full import near_full_slowdown
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.memory.reported_memory import memory_requirement
from workbench.costmodel.microbatch_durations import MicrobatchDurations, microbatch_durations
from workbench.costmodel.pipeline_bubble import action_seconds
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.fitted_constants import measured_profile
from workbench.costmodel.step_time import (
    StepTime,
    model_flops_utilization,
    step_time,
    step_time_breakdown,
)
from workbench.plan.model.four_bit_base import four_bit_notes
from workbench.plan.operators.traced.traced_json import TracedModel
from workbench.plan.rank_placement import first_ranks_of_replicas, representative_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.assumed_hardware import assumed_hardware
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimated_frames import (
    ShownRanks,
    collectives_frame,
    memory_frame,
    steps_frame,
)
from workbench.planner.estimated_timeline import (
    simulated_step_seconds,
    simulated_timeline,
    timeline_frame,
)
from workbench.planner.framework_limits import broken_limits
from workbench.planner.memory_advice import beside_capacity, first_fitting_change
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.operator_plans.traced_plan import with_traced
from workbench.planner.profiled_models.estimate_on_profile import estimate_on_profile
from workbench.planner.published_steps import beyond_published, published_beside
from workbench.planner.step_interval import step_seconds_interval
from workbench.profile import Profile
from workbench.units import GIB

UNCALIBRATED_NOTE = "assumed figures, not calibrated: `workbench calibrate` measures this machine"
"""What stands beside the times of CPU ranks that nothing was measured of: no datasheet knows them.
"""


def estimate(plan: Plan, model: TracedModel | None = None) -> Profile:
    """Peak memory by category and pipeline stage, step time by part, every collective; fits, and
    else what would fit.

    Completes the plan. One rank a pipeline stage stands for all ranks of that stage; where stages
    have replicas of their own, one for each kind of them, and the busiest decides the time. Raises
    `PlanError` where the plan is illegal or asks for what the planner does not model.

    Args:
        plan: The plan.
        model: Its module, traced, where it is code: who may run that has allowed it.
    """
    full = plan.resolve()
    if full.profiled:
        return estimate_on_profile(plan, full)
    full, traced = with_traced(full, model)
    full, k = with_calibration(full)
    w = planned_workload(full, traced=traced)
    time = step_time(w, k)
    drawn, microbatches = simulated_timeline(w, time.durations)
    representative = representative_ranks(full)
    ranks = sorted(set(representative.values()))
    shown = _shown(full, w, k, time, ranks)
    in_time = shown
    if w.fixed.in_turn:  # which do the same, but not at the same time
        in_time = _shown(full, w, k, time, first_ranks_of_replicas(full))
    live = peak_memory(shown.workload, k)
    head = {"run": full.name, "source": "estimated", "step": 0}
    most, capacity = float(live.peak.max()), int(full.gpu.memory_gib * GIB)
    notes = _step_notes(full, w, k, time) | _memory_notes(full, k, most, capacity)
    notes["simulated_step_seconds"] = simulated_step_seconds(w, time, drawn, microbatches)
    if traced is None:  # measured steps are of models with a shape
        notes |= _measured_notes(full, w, time, notes["model_flops_utilisation"])
    notes |= _scope_notes(full, w, microbatches)
    if traced is None and not beside_capacity(live, full).fits:
        notes["advice"] = first_fitting_change(plan, full)
    own = [exact_collectives(shown.workload, shown.calls, place) for place in range(len(ranks))]
    return Profile(
        run=full.name,
        source="estimated",
        world_size=full.world_size,
        memory=memory_frame(head, live.moments, live.beyond, shown.rows),
        timeline=timeline_frame(
            head,
            drawn,
            in_time.rows,
            in_time.workload,
            action_seconds(in_time.workload, in_time.durations),
            action_seconds(w, time.durations),
        ),
        collectives=collectives_frame(head, own, shown.rows),
        steps=steps_frame(head, float(time.seconds), full),
        representative=representative,
        capacity_bytes=capacity,
        host_capacity_bytes=full.host_capacity_bytes,
        notes=notes,
    )


def _step_notes(full: ResolvedPlan, w: Workload, k: Constants, time: StepTime) -> dict[str, Any]:
    """The step by part, and what its times rest on."""
    notes: dict[str, Any] = {
        "time": step_time_breakdown(w, time),
        "model_flops_utilisation": float(model_flops_utilization(w, k, time)),
    }
    if (used := cpu_seconds(w, k)) is not None:
        notes["cpu_seconds"] = used
    if cannot := broken_limits(full):
        notes["cannot"] = "; ".join(cannot)
    if full.gpu.device == "cpu" and full.cluster.calibration is None:
        notes["uncalibrated"] = UNCALIBRATED_NOTE
    if full.strategy.data.offload != "none":
        known = "calibrated" if k.measured_host_gbs else "assumed, not calibrated"
        notes["host_optimizer"] = f"{host_gbs(w.fixed, k):.1f} GB/s of host memory a rank, {known}"
    if assumed := assumed_hardware(full):
        notes["assumed_hardware"] = assumed
    return notes


def _memory_notes(full: ResolvedPlan, k: Constants, most: float, capacity: int) -> dict[str, Any]:
    """Memory requirement of a peak of `most` bytes on a GPU of `capacity`; where it does not fit,
    no step is slowed down.
    """
    stack, fits = full.strategy.stack, most <= capacity
    slower = near_full_slowdown(most, capacity, stack, k) if fits else None
    return {"memory": memory_requirement(most, capacity, stack) | {"expected_slowdown": slower}}


def _measured_notes(full: ResolvedPlan, w: Workload, time: StepTime, mfu: float) -> dict[str, Any]:
    """What measured and published steps say of this one."""
    notes: dict[str, Any] = {"step_seconds_90": list(step_seconds_interval(full, w, time))}
    if published := published_beside(full, measured_profile(full.strategy.stack)):
        notes["published"] = published | {"promise": beyond_published(published, mfu) or None}
    return notes


def _scope_notes(full: ResolvedPlan, w: Workload, microbatches: int) -> dict[str, Any]:
    """Where kernels' costs are from, what is not modelled, and a timeline of `microbatches`."""
    notes: dict[str, Any] = four_bit_notes(full)
    if w.uses_fused_kernels:
        notes["kernels"] = kernel_cost_source(full.gpu, full.strategy.kernels)
    if full.shape.unmodelled:
        notes["not_modelled"] = full.shape.unmodelled
    if microbatches < w.step_microbatches:
        notes["timeline_microbatches"] = microbatches
    return notes


class _Shown(NamedTuple):
    """The ranks that an estimate has rows of."""

    rows: ShownRanks
    workload: Workload
    calls: list[CollectiveCall]
    durations: MicrobatchDurations


def _shown(
    full: ResolvedPlan, w: Workload, k: Constants, time: StepTime, ranks: list[int]
) -> _Shown:
    """What `ranks` do: where they are the first of each stage, `w` and `time` have it already."""
    rows = ShownRanks.of(full, ranks)
    if not full.strategy.pipeline.replicas:
        return _Shown(rows, w, time.calls, time.durations)
    own = planned_workload(full, ranks)
    calls = step_collectives(own)
    return _Shown(rows, own, calls, microbatch_durations(own, k, calls))
