"""A step of unequal stages through the simulator: transfers run as stages of their own, and each
stage all-reduces its gradients after its last backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.planner.unequal_stages.stage_times import StageTimes
from workbench.schedules import Action, Table, Timeline, simulate
from workbench.schedules.named.gpipe import gpipe_row
from workbench.schedules.named.one_f_one_b import row_with_warm_up
from workbench.schedules.table import Row


def simulated(times: StageTimes, held: Sequence[int], microbatches: int) -> Timeline:
    """The timeline of 1F1B with `held` microbatches in flight by stage, transfers counted."""
    return _run(times, [row_with_warm_up(i, k, microbatches) for i, k in enumerate(held)])


def simulated_gpipe(times: StageTimes, microbatches: int) -> Timeline:
    """The timeline of GPipe: all forwards, then all backwards."""
    stages = len(times.forward)
    return _run(times, [gpipe_row(i, stages, microbatches, 1) for i in range(stages)])


def _run(times: StageTimes, rows: Sequence[Row]) -> Timeline:
    reduced = tuple((*row, Action(i, "REDUCE_GRAD")) for i, row in enumerate(rows))
    stages = len(rows)
    microbatches = sum(action.kind == "F" for action in rows[0])
    durations = {"F": times.forward, "B": times.backward, "REDUCE_GRAD": times.all_reduce}
    return simulate(Table(reduced, stages, microbatches, tuple(range(stages))), durations)
