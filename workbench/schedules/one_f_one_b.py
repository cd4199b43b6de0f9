"""1F1B: one forward, one backward (PipeDream-flush, 2104.04473; DAPPLE's early backward,
PPoPP'21).
"""

from __future__ import annotations

from workbench.schedules.action import Action
from workbench.schedules.pipeline_schedule import PipelineSchedule, smaller, unsplit_bubble
from workbench.schedules.table import Row


def one_f_one_b_row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """A warm-up of `ranks - 1 - rank` forwards, then in turn: at most `ranks - rank` in flight."""
    warm_up = min(microbatches, ranks - 1 - rank)
    row = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "B", m))
    return tuple(row)


ONE_F_ONE_B = PipelineSchedule(
    one_f_one_b_row, unsplit_bubble, lambda rank, p, m, chunks: smaller(m, p - rank)
)
