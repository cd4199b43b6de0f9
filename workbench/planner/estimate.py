"""What a plan will cost, in closed form and milliseconds: the planner's whole answer as a
Profile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.communication.collective_volume import exact_collectives
from workbench.costmodel.compute.kernel_benchmarks import kernel_cost_source
from workbench.costmodel.cpu_seconds import cpu_seconds
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.near_full import near_full_slowdown
from workbench.costmodel.memory.peak_memory import PeakMemory, peak_memory
from workbench.costmodel.memory.reported_memory import memory_requirement
from workbench.costmodel.rates.fitted_constants import measured_profile
from workbench.costmodel.step_time import model_flops_utilization, step_time, step_time_breakdown
from workbench.plan.rank_placement import first_ranks_of_stages, representative_ranks
from workbench.plan.schema import Plan
from workbench.planner.assumed_hardware import assumed_hardware
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimated_timeline import simulated_step_seconds, simulated_timeline
from workbench.planner.framework_limits import broken_limits
from workbench.planner.memory_advice import first_fitting_change
from workbench.planner.published_steps import beyond_published, published_beside
from workbench.planner.step_interval import step_seconds_interval
from workbench.profile import MOMENTS, Columns, Profile, columns_of, frame
from workbench.schedules import Timeline
from workbench.units import GIB

UNCALIBRATED_NOTE = "assumed figures, not calibrated: `workbench calibrate` measures this machine"
"""What stands beside the times of CPU ranks that nothing was measured of: no datasheet knows them.
"""


def estimate(plan: Plan) -> Profile:
    """Peak memory by category and pipeline stage, step time by part, every collective; fits, and
    else what would fit.

    Completes the plan. One rank a pipeline stage stands for all ranks of that stage. Raises
    `PlanError` where the plan is illegal or asks for what the planner does not model.
    """
    full, k = with_calibration(plan.resolve())
    w = workload(full)
    live, time = peak_memory(w, k), step_time(w, k)
    drawn, microbatches = simulated_timeline(w, time.durations)
    starts = first_ranks_of_stages(full)
    head = {"run": full.name, "source": "estimated", "step": 0}
    capacity = int(full.gpu.memory_gib * GIB)
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
    if assumed := assumed_hardware(full):
        notes["assumed_hardware"] = assumed
    most, stack = float(live.peak.max()), full.strategy.stack
    notes["memory"] = memory_requirement(most, capacity, stack) | {
        "expected_slowdown": near_full_slowdown(most, capacity, stack, k)
    }
    notes["simulated_step_seconds"] = simulated_step_seconds(w, time, drawn, microbatches)
    notes["step_seconds_90"] = list(step_seconds_interval(full, w, time))
    if published := published_beside(full, measured_profile(stack)):
        beyond = beyond_published(published, notes["model_flops_utilisation"])
        notes["published"] = published | {"promise": beyond or None}
    if w.uses_fused_kernels:
        notes["kernels"] = kernel_cost_source(full.gpu, full.strategy.kernels)
    if full.shape.unmodelled:
        notes["not_modelled"] = full.shape.unmodelled
    if microbatches < w.microbatches:
        notes["timeline_microbatches"] = microbatches
    if most > capacity:
        notes["advice"] = first_fitting_change(plan, full)
    own = [exact_collectives(w, time.calls, rank) for rank in range(w.pipeline)]
    seconds = float(time.seconds)
    return Profile(
        run=full.name,
        source="estimated",
        world_size=full.world_size,
        memory=_memory_frame(head, live, starts),
        timeline=_timeline_frame(head, drawn, starts),
        collectives=_collectives_frame(head, own, starts),
        steps=_steps_frame(head, seconds, _tokens_per_step(full)),
        representative=representative_ranks(full),
        capacity_bytes=capacity,
        notes=notes,
    )


def _tokens_per_step(plan: Plan) -> int:
    return plan.training.global_batch * plan.training.sequence_length


def _memory_frame(head: dict[str, Any], live: PeakMemory, starts: list[int]) -> Columns:
    """A row a stage, moment and category that is not nothing; host rows at every moment, for they
    do not move.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("stage", "moment", "tier", "category", "bytes")
    }
    for moment in MOMENTS:
        for tier, table in (("device", live.moments[moment]), ("host", live.host)):
            for category, sizes in table.items():
                for stage, size in enumerate(sizes.tolist()):
                    if size > 0:
                        for name, value in zip(
                            columns, (stage, moment, tier, category, round(size))
                        ):
                            columns[name].append(value)
    return _frame("memory", head, columns, starts)


def _timeline_frame(head: dict[str, Any], simulated: Timeline | None, starts: list[int]) -> Columns:
    intervals = simulated.intervals if simulated else ()
    columns: dict[str, list[Any]] = {
        "stage": [i.action.stage for i in intervals],
        "microbatch": [i.action.microbatch for i in intervals],
        "action": [i.action.kind for i in intervals],
        "start": [i.start for i in intervals],
        "end": [i.end for i in intervals],
    }
    return _frame("timeline", head, columns, starts, [i.rank for i in intervals])


def _collectives_frame(
    head: dict[str, Any], calls: list[list[CollectiveCall]], starts: list[int]
) -> Columns:
    names = ("axis", "kind", "group_size", "dtype", "bytes", "count", "action")
    rows = [(stage, call) for stage, own in enumerate(calls) for call in own]
    columns: dict[str, list[Any]] = {
        name: [getattr(call, name) for _, call in rows] for name in names
    }
    columns |= {name: [round(x) for x in columns[name]] for name in ("bytes", "count")}
    columns["stage"] = [stage for stage, _ in rows]
    return _frame("collectives", head, columns, starts)


def _steps_frame(head: dict[str, Any], seconds: float, tokens: int) -> Columns:
    row = head | {"rank": 0, "seconds": seconds, "tokens": tokens, "skipped": False}
    return Columns(row, 1, lambda: frame("steps", [row]))


def _frame(
    kind: str,
    head: dict[str, Any],
    columns: dict[str, list[Any]],
    starts: list[int],
    homes: list[int] | None = None,
) -> Columns:
    """A frame from columns; ranks follow from pipeline ranks, which are the stages unless `homes`
    says.
    """
    arrays = {name: np.array(values) for name, values in columns.items()}
    ranks = {
        "rank": np.array(starts)[np.array(arrays["stage"] if homes is None else homes, dtype=int)]
    }
    return columns_of(kind, arrays | ranks | head, len(columns["stage"]))
