"""The estimate of a plan whose model is a layer profile: its layers' measured times and sizes, the
links of the plan's cluster, and the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.config import Array
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.rank_placement import RankPlace, rank_place, representative_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import STORED, Plan
from workbench.plan.stage_replicas import even_parts, overlaps
from workbench.planner.estimated_frames import (
    ShownRanks,
    collectives_frame,
    memory_frame,
    steps_frame,
    timeline_frame,
)
from workbench.planner.estimated_timeline import MAX_ACTIONS
from workbench.planner.memory_advice import first_fitting_change
from workbench.planner.profiled_models.planned_stages import PlannedStages, planned_stages
from workbench.planner.profiled_models.step_seconds import step_seconds, timeline
from workbench.planner.unequal_stages.stage_times import one_device_seconds
from workbench.profile import MOMENTS, Profile
from workbench.schedules import Interval, Timeline

NOT_COUNTED = ("the optimizer's step", "latencies of transfers")
OUTPUTS_ONLY = "what layers keep for backward beside their outputs"
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
    ranks = sorted(set(representative.values()))
    places = [rank_place(full, rank) for rank in ranks]
    shown = ShownRanks(ranks, [place.stage for place in places])
    head = {"run": full.name, "source": "estimated", "step": 0}
    one = one_device_seconds(planned.profile, planned.batch)
    notes: dict[str, Any] = {
        "time": took.parts,
        "closed_form_seconds": took.closed_form,
        "one_device_seconds": one,
        "speed_up": one / took.simulated,
        "activation_communication_ratio": planned.times.activation_communication_ratio,
        "microbatches_in_flight": list(planned.in_flight),
        "layer_times": planned.profile.source or "measured, the file does not say on what",
        "not_modelled": ", ".join(_not_counted(planned, full)),
    }
    if drawn < planned.batch.microbatches:
        notes["timeline_microbatches"] = drawn
    if max(planned.peak_bytes) > planned.topology.memory:
        notes["advice"] = first_fitting_change(plan, full)
    ran = _computed(timeline(planned, took.times, drawn), [_share(planned, p) for p in places])
    calls = [list(_calls(planned, full, place)) for place in places]
    return Profile(
        run=full.name,
        source="estimated",
        world_size=full.world_size,
        memory=memory_frame(head, _memory(planned, full, places), {}, shown),
        timeline=timeline_frame(head, ran, shown),
        collectives=collectives_frame(head, calls, shown),
        steps=steps_frame(head, took.simulated, full),
        representative=representative,
        capacity_bytes=int(planned.topology.memory),
        notes=notes,
    )


def _not_counted(planned: PlannedStages, full: ResolvedPlan) -> Iterator[str]:
    yield from NOT_COUNTED
    if any(layer.kept_bytes is None for layer in planned.profile.layers):
        yield OUTPUTS_ONLY
    if full.gpu.device == "cpu" and full.world_size > 1:
        yield ASSUMED_LINKS


def _share(planned: PlannedStages, place: RankPlace) -> tuple[int, float]:
    """(stage of a rank, its sequences of a microbatch over those of the busiest replica there)."""
    parts = even_parts(planned.batch.sequences, planned.stages[place.stage].replicas)
    sizes = [stop - start for start, stop in parts]
    return place.stage, sizes[_turn(planned, place)] / sizes[0]


def _turn(planned: PlannedStages, place: RankPlace) -> int:
    """Which replica of its stage a rank is."""
    return place.replica % planned.stages[place.stage].replicas


def _memory(
    planned: PlannedStages, full: ResolvedPlan, places: Sequence[RankPlace]
) -> dict[str, dict[str, Array]]:
    """Bytes of the ranks at `places` by moment and category."""
    each = state_bytes(full)
    shares = [_share(planned, place) for place in places]
    sizes = np.array([planned.parameter_bytes(planned.stages[stage]) for stage, _ in shares])
    states = {
        "parameters": each.parameter,
        "gradients": each.gradient,
        "optimizer": each.moments,
        "master": each.master,
    }
    persistent = {name: sizes * size / each.parameter for name, size in states.items()}
    activations = np.array([planned.activations[stage] * share for stage, share in shares])
    in_flight = persistent | {"activations": activations}
    kept = ("forward_end", "peak", "maximum")
    return {moment: in_flight if moment in kept else persistent for moment in MOMENTS}


def _computed(
    drawn: Timeline, shares: Sequence[tuple[int, float]]
) -> Iterator[tuple[int, Interval]]:
    """What the ranks of `shares` run; transfers, stages of their own to the simulator, run beside
    it. A replica of fewer sequences starts when the busiest of its stage does, and ends earlier.
    """
    for at, (stage, share) in enumerate(shares):
        for rank, action, start, end in drawn.intervals:
            if rank == 2 * stage and (end > start or action.is_compute):
                seconds = (end - start) * (share if action.is_compute else 1.0)
                yield at, Interval(stage, replace(action, stage=stage), start, start + seconds)


def _calls(
    planned: PlannedStages, full: ResolvedPlan, place: RankPlace
) -> Iterator[CollectiveCall]:
    """Calls of the rank at `place`: what it exchanges with the replicas of the stages beside, and
    its all-reduce.
    """
    batch, stage, own = planned.batch, place.stage, planned.stages[place.stage]
    dtype = STORED.get(full.strategy.precision, full.strategy.precision)
    parts = [even_parts(batch.sequences, one.replicas) for one in planned.stages]
    for side, first in ((-1, own.first), (1, own.end)):
        if 0 <= stage + side < len(parts):
            one = planned.profile.crossing[first] / planned.profile.profile_batch
            for _, (start, stop) in overlaps(
                parts[stage][_turn(planned, place)], parts[stage + side]
            ):
                for kind in ("send", "recv"):
                    size = one * (stop - start)
                    yield CollectiveCall(
                        "pipeline", kind, full.world_size, dtype, size, batch.microbatches, "P2P"
                    )
    if own.replicas > 1:
        gradients = batch.gradient_factor * planned.parameter_bytes(own)
        of = full.strategy.gradient_dtype
        yield CollectiveCall("data", "all_reduce", own.replicas, of, gradients, 1, "REDUCE_GRAD")
