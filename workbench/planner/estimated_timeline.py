"""The step as a picture: the schedule's table, simulated with each pipeline rank's estimated
durations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from workbench.costmodel.inputs.config import Array, named_table
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.microbatch_durations import MicrobatchDurations
from workbench.costmodel.pipeline_bubble import MAX_ACTIONS, simulated_makespan, simulated_schedule
from workbench.costmodel.step_time import StepTime
from workbench.planner.estimated_frames import ShownRanks
from workbench.profile import Columns
from workbench.schedules import Timeline
from workbench.schedules.generators import SCHEDULES


def simulated_timeline(w: Workload, d: MicrobatchDurations) -> tuple[Timeline | None, int]:
    """(timeline of one plan, microbatches in it); None where the schedule has no table or fills too
    slowly.
    """
    s = w.fixed
    whole = int(w.step_microbatches)
    if s.table is not None:
        return simulated_schedule(w, d, s.table), whole
    turn = w.pipeline if SCHEDULES[s.schedule].needs_multiple_of_ranks else 1
    microbatches = min(whole, MAX_ACTIONS // (2 * w.pipeline * s.chunks) // turn * turn)
    if microbatches < min(whole, 2 * (sum(s.replicas) if s.in_turn else w.pipeline)):
        return None, 0
    return simulated_schedule(w, d, named_table(s, microbatches)), microbatches


def simulated_step_seconds(
    w: Workload, time: StepTime, drawn: Timeline | None, microbatches: int
) -> float | None:
    """The step of one plan by event simulation: `drawn` with `microbatches`, the rest at the
    slowest rank's pace.

    Closed forms count unequal stages only roughly. None where nothing was simulated.
    """
    if drawn is None:
        return None
    if w.fixed.in_flight or w.fixed.in_turn:
        makespan = simulated_makespan(w, time.durations)
    else:
        pace = float((time.durations.forward + time.durations.backward).max())
        makespan = drawn.makespan + (float(w.microbatches) - microbatches) * pace
    return makespan + sum(float(part) for part in time.after.values())


def timeline_frame(
    head: dict[str, Any],
    simulated: Timeline | None,
    shown: ShownRanks,
    w: Workload,
    seconds: dict[str, Array],
    longest: dict[str, Array],
) -> Columns:
    """Actions of each rank as its pipeline rank was simulated. A replica that has fewer sequences
    starts when the busiest of its stage does, and ends earlier.

    Args:
        head: Cells that every row has.
        simulated: What was simulated, if anything.
        shown: The ranks.
        w: Their problem sizes.
        seconds: Action -> how long it takes each of them.
        longest: The same by stage, as simulated.
    """
    of_row = defaultdict(list)
    for interval in simulated.intervals if simulated else ():
        of_row[interval.rank].append(interval)
    rows = [
        (at, i, longest[i.action.kind][place.stage] - seconds[i.action.kind][at])
        for at, place in enumerate(w.places)
        for i in of_row[w.fixed.table_row(place)]
    ]
    columns: dict[str, list[Any]] = {
        "at": [at for at, *_ in rows],
        "stage": [i.action.stage for _, i, _ in rows],
        "microbatch": [i.action.microbatch for _, i, _ in rows],
        "action": [i.action.kind for _, i, _ in rows],
        "start": [i.start for _, i, _ in rows],
        "end": [i.end - earlier for _, i, earlier in rows],
    }
    return shown.frame("timeline", head, columns)
