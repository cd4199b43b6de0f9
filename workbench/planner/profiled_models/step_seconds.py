"""Seconds of a step of planned stages: by the simulator, in closed form, and by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.planner.profiled_models.planned_stages import PlannedStages
from workbench.planner.unequal_stages.latency import latency
from workbench.planner.unequal_stages.memory import with_transfers
from workbench.planner.unequal_stages.overlapped_all_reduce import with_overlap
from workbench.planner.unequal_stages.simulated import simulated, simulated_gpipe
from workbench.planner.unequal_stages.stage_times import StageTimes
from workbench.schedules import Timeline, closed_forms

MOST_ACTIONS = 2**14
"""That are simulated, about 0.1 s; further microbatches take what the last ones did."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step."""

    simulated: float
    closed_form: float
    """DAPPLE's latency (2007.01045), never above `simulated`."""
    parts: dict[str, float]
    """Part -> seconds; they add up to `simulated`."""
    times: StageTimes
    """Of a microbatch, and of all-reduces as far as they are exposed."""


def step_seconds(planned: PlannedStages, overlap: bool) -> StepSeconds:
    """Seconds of a step of `planned`; with `overlap` the only stage all-reduces a layer's gradients
    while those before it run backward.
    """
    times = planned.times
    if overlap:
        of = (planned.profile, planned.stages, planned.topology, planned.batch)
        times = with_overlap(times, *of)
    silent = replace(times, all_reduce=(0.0,) * len(times.forward))
    local = replace(
        silent,
        **{name: _without_transfers(getattr(times, name)) for name in ("forward", "backward")},
    )
    step, reduced, alone = (_makespan(planned, each) for each in (times, silent, local))
    busiest = max(f + b for f, b in zip(local.forward, local.backward))
    compute = planned.batch.microbatches * busiest
    held = with_transfers(planned.in_flight)
    parts = {
        "compute": compute,
        "pipeline_comm": reduced - alone,
        "bubble": alone - compute,
        "data_comm": step - reduced,
    }
    closed_form = latency(times, held, planned.batch.microbatches).seconds
    return StepSeconds(step, closed_form, parts, times)


def timeline(planned: PlannedStages, times: StageTimes, microbatches: int) -> Timeline:
    """So many microbatches of `planned` through the simulator."""
    if planned.keeps_all:
        return simulated_gpipe(times, microbatches)
    held = [min(count, microbatches) for count in with_transfers(planned.in_flight)]
    return simulated(times, held, microbatches)


def _makespan(planned: PlannedStages, times: StageTimes) -> float:
    """Seconds of all microbatches, those of a long step from its first ones, but not below the
    closed form: where a slower path takes long to become the longest, they do not show its pace.
    """
    rows = len(times.forward)
    held = 2 * rows if planned.keeps_all else max(with_transfers(planned.in_flight))

    def makespan(count: int) -> float:
        return timeline(planned, times, count).makespan

    count = planned.batch.microbatches
    found = closed_forms.long_makespan(makespan, count, MOST_ACTIONS // (2 * rows), held)
    return max(found, latency(times, with_transfers(planned.in_flight), count).seconds)


def _without_transfers(seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(0.0 if i % 2 else each for i, each in enumerate(seconds))
