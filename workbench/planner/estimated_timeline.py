"""The step as a picture: the schedule's table, simulated with each pipeline rank's estimated
durations.
"""

from __future__ import annotations

from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.step_time import (
    MAX_ACTIONS,
    MicrobatchDurations,
    StepTime,
    simulated_schedule,
    whole_makespan,
)
from workbench.schedules import Timeline, generate
from workbench.schedules.generators import SCHEDULES
from workbench.schedules.round_robin import shortened


def simulated_timeline(w: Workload, d: MicrobatchDurations) -> tuple[Timeline | None, int]:
    """(timeline of one plan, microbatches in it); None where the schedule has no table or fills too
    slowly.
    """
    s = w.fixed
    if s.table is not None:
        table = shortened(s.table, MAX_ACTIONS)
        return simulated_schedule(w, d, table), table.microbatches
    whole = int(w.microbatches)
    turn = w.pipeline if SCHEDULES[s.schedule].needs_multiple_of_ranks else 1
    microbatches = min(whole, MAX_ACTIONS // (2 * w.pipeline * s.chunks) // turn * turn)
    if microbatches < min(whole, 2 * w.pipeline):
        return None, 0
    table = generate(s.schedule, w.pipeline, microbatches, s.chunks)
    return simulated_schedule(w, d, table), microbatches


def simulated_step_seconds(
    w: Workload, time: StepTime, drawn: Timeline | None, microbatches: int
) -> float | None:
    """The step of one plan by event simulation: `drawn` with `microbatches`, the rest at the
    slowest rank's pace.

    Closed forms count unequal stages only roughly. None where nothing was simulated.
    """
    if drawn is None:
        return None
    makespan = whole_makespan(w, time.durations, drawn.makespan, microbatches)
    return makespan + sum(float(part) for part in time.after.values())
