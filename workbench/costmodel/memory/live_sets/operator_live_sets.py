"""Live sets of plans with operator strategies, by the phases of `memory/live_sets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.executed_schedule import executed_schedule
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.live_sets.schedule_walk import ScheduleWalk
from workbench.costmodel.operators.allocation_tape import LiveSet
from workbench.costmodel.rank_passes import rank_passes

CATEGORIES = ("activations", "logits", "temporary", "communication")


def operator_live_sets(w: Workload) -> dict[str, dict[str, Array]]:
    """Phase -> category -> bytes by rank: the most that is live in any action of a step, and as
    `first_forward` what the first one leaves.
    """
    walks = rank_walks(w)
    names = sorted({name for walk in walks for name in walk.largest})
    live = {name: _columns([walk.largest.get(name, {}) for walk in walks]) for name in names}
    return {"first_forward": _columns([walk.first_forward for walk in walks]), **live}


@lru_cache(maxsize=8)
def rank_walks(w: Workload) -> tuple[ScheduleWalk, ...]:
    """The schedule of each of `w.places`, walked through."""
    return tuple(_walks(w))


def _walks(w: Workload) -> Iterator[ScheduleWalk]:
    each = w.zero >= 2 and bool(np.all(w.reduce_microbatch))
    schedule = executed_schedule(w.fixed, int(np.max(w.step_microbatches)), each)
    table = schedule.table
    passes = rank_passes(w)
    split = rank_passes(w, True) if table.split else passes
    boundaries = np.broadcast_to(w.residual_bytes, w.zeros.shape)
    for at, place in enumerate(w.places):
        row = w.fixed.table_row(place)
        stages = table.stages_of(row)
        yield ScheduleWalk(
            table.rows[row],
            schedule.sends_end[row],
            dict(zip(stages, passes[at])),
            dict(zip(stages, split[at])),
            table.stages,
            float(boundaries[at]),
        ).run()


def _columns(sets: Sequence[LiveSet]) -> dict[str, Array]:
    return {name: np.array([live.get(name, 0.0) for live in sets]) for name in CATEGORIES}
