"""The estimate of a plan whose model is a layer profile: its layers' measured times and sizes, the
links of the plan's cluster, and the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.costmodel.inputs.config import Array
from workbench.costmodel.pipeline_bubble import MAX_ACTIONS
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.rank_placement import RankPlace, rank_place, representative_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.estimated_frames import (
    ShownRanks,
    collectives_frame,
    memory_frame,
    steps_frame,
)
from workbench.planner.memory_advice import first_fitting_change
from workbench.planner.profiled_models.measured_on import measured_on
from workbench.planner.profiled_models.planned_stages import PlannedStages, planned_stages
from workbench.planner.profiled_models.stage_calls import stage_calls
from workbench.planner.profiled_models.step_seconds import StepSeconds, step_seconds, timeline
from workbench.planner.unequal_stages.stage_times import one_device_seconds
from workbench.profile import MOMENTS, Profile
from workbench.schedules import Timeline

NOT_COUNTED = ("the optimizer's step", "latencies of transfers", "buffers of communication")
OUTPUTS_ONLY = "what layers keep for backward beside their outputs"
UNKNOWN_BACKWARD = "memory that backward alone needs, which the file does not say"
UNKNOWN_TIES = "copies of a weight that layers of several stages share, which the file does not say"
ASSUMED_LINKS = "links of CPU ranks, which are assumed figures"


def estimate_on_profile(plan: Plan, full: ResolvedPlan) -> Profile:
    """Peak memory by category and stage, step time by the simulator, every transfer; as `estimate`
    answers for other models.

    Args:
        plan: As written.
        full: `plan` resolved; its model is a layer profile.
    """
    planned = planned_stages(full)
    took = step_seconds(planned, full.strategy.data.overlap)
    drawn = min(planned.batch.microbatches, MAX_ACTIONS // (2 * len(planned.stages)))
    representative = representative_ranks(full)
    shown = ShownRanks.of(full, sorted(set(representative.values())))
    places = [rank_place(full, rank) for rank in shown.ranks]
    head = {"run": full.name, "source": "estimated", "step": 0}
    ran = timeline(planned, took.times, drawn)
    return Profile(
        run=full.name,
        source="estimated",
        world_size=full.world_size,
        memory=memory_frame(head, _memory(planned, full, places), {}, shown, "parameters"),
        timeline=shown.frame("timeline", head, _timeline(planned, ran, places)),
        collectives=collectives_frame(
            head, [stage_calls(planned, full, at) for at in places], shown
        ),
        steps=steps_frame(head, took.simulated, full),
        representative=representative,
        capacity_bytes=int(planned.topology.memory),
        notes=_notes(plan, full, planned, took, drawn),
    )


def _notes(
    plan: Plan, full: ResolvedPlan, planned: PlannedStages, took: StepSeconds, drawn: int
) -> dict[str, Any]:
    one = one_device_seconds(planned.profile, planned.batch)
    notes: dict[str, Any] = {
        "time": took.parts,
        "closed_form_seconds": took.closed_form,
        "one_device_seconds": one,
        "speed_up": one / took.simulated,
        "activation_communication_ratio": planned.times.activation_communication_ratio,
        "microbatches_in_flight": list(planned.in_flight),
        "layer_times": measured_on(full),
        "not_modelled": ", ".join(_not_counted(planned, full)),
    }
    if drawn < planned.batch.microbatches:
        notes["timeline_microbatches"] = drawn
    if max(planned.peak_bytes) > planned.topology.memory:
        notes["advice"] = first_fitting_change(plan, full)
    return notes


def _not_counted(planned: PlannedStages, full: ResolvedPlan) -> Iterator[str]:
    yield from NOT_COUNTED
    if any(layer.kept_bytes is None for layer in planned.profile.layers):
        yield OUTPUTS_ONLY
    if any(layer.backward_bytes is None for layer in planned.profile.layers):
        yield UNKNOWN_BACKWARD
    if any(layer.tied is None for layer in planned.profile.layers):
        yield UNKNOWN_TIES
    if full.gpu.device == "cpu" and full.world_size > 1:
        yield ASSUMED_LINKS


def _memory(
    planned: PlannedStages, full: ResolvedPlan, places: list[RankPlace]
) -> dict[str, dict[str, Array]]:
    """Bytes of each shown rank by moment and category."""
    each = state_bytes(full)
    sizes = np.array([planned.parameter_bytes(planned.stages[at.stage]) for at in places])
    states = {
        "parameters": each.parameter,
        "gradients": each.gradient,
        "optimizer": each.moments,
        "master": each.master,
    }
    persistent = {name: sizes * size / each.parameter for name, size in states.items()}
    share = np.array([planned.share(at.stage, at.replica) for at in places])
    kept, beside = (
        share * [of(at.stage) for at in places] for of in (planned.activations, planned.temporary)
    )
    in_flight = persistent | {"activations": kept}
    peak = in_flight | {"temporary": beside}
    holding = {"forward_end": in_flight, "peak": peak, "maximum": peak}
    return {moment: holding.get(moment, persistent) for moment in MOMENTS}


def _timeline(
    planned: PlannedStages, ran: Timeline, places: list[RankPlace]
) -> dict[str, list[Any]]:
    """What each shown rank runs; transfers, stages of their own to the simulator, run beside it. A
    replica that has fewer sequences starts when the busiest of its stage does, and ends earlier.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("at", "microbatch", "action", "start", "end")
    }
    for at, place in enumerate(places):
        share = planned.share(place.stage, place.replica)
        for rank, action, start, end in ran.intervals:
            if rank == 2 * place.stage and (end > start or action.is_compute):
                took = (end - start) * (share if action.is_compute else 1.0)
                row = (at, action.microbatch, action.kind, start, start + took)
                for name, value in zip(columns, row):
                    columns[name].append(value)
    return columns
