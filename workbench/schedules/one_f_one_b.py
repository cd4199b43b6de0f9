"""1F1B: one forward, one backward (PipeDream-flush, 2104.04473; DAPPLE's early backward,
PPoPP'21).
"""

from __future__ import annotations

from workbench.schedules.action import Action
from workbench.schedules.pipeline_schedule import PipelineSchedule, smaller, unsplit_bubble
from workbench.schedules.table import Row


def row_with_warm_up(rank: int, in_flight: int, microbatches: int) -> Row:
    """Forwards of all but one of `in_flight` microbatches, then a forward and a backward in turn.

    No table of such rows deadlocks as long as no rank has more in flight than the one before it,
    which would be asked for forwards beyond those that it makes before its first backward.
    """
    warm_up = min(microbatches, in_flight - 1)
    row = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "B", m))
    return tuple(row)


def one_f_one_b_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """A warm-up of `ranks - 1 - rank` forwards, then in turn: at most `ranks - rank` in flight."""
    return row_with_warm_up(rank, ranks - rank, microbatches)


ONE_F_ONE_B = PipelineSchedule(
    one_f_one_b_row, unsplit_bubble, lambda rank, p, m, chunks: smaller(m, p - rank)
)
