"""1F1B: one forward, one backward (PipeDream-flush, 2104.04473), after a warm-up by DAPPLE's policy
PA or PB (early backward, 2007.01045).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from workbench.schedules.action import Action
from workbench.schedules.pipeline_schedule import Number, PipelineSchedule, smaller, unsplit_bubble
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


def shortened_warm_up(wanted: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """Microbatches in flight by rank: those `wanted`, but no more than `most` of its own, nor than
    the rank before it has.
    """
    return tuple(accumulate(map(min, wanted, most), min))


def _by_policy(held: Callable[[Number, Number], Number], pair_groups: bool) -> PipelineSchedule:
    """The schedule whose rank r of p has at most `held(r, p)` microbatches in flight."""
    return PipelineSchedule(
        lambda rank, p, m, chunks: row_with_warm_up(rank, held(rank, p), m),
        unsplit_bubble,
        lambda rank, p, m, chunks: smaller(m, held(rank, p)),
        warm_up=held,
        pair_groups=pair_groups,
    )


ONE_F_ONE_B = _by_policy(lambda rank, p: p - rank, pair_groups=False)
"""Policy PA: as many in flight as there are ranks from this one on, enough where transfers take no
time.
"""
EAGER_1F1B = _by_policy(lambda rank, p: 2 * (p - rank) - 1, pair_groups=True)
"""Policy PB, "eager-1F1B" of 2211.05322: 1F1B of a pipeline in which each transfer is a stage of its
own, so that transfers run beside compute. In one process group, NCCL's order of transfers would
undo that.
"""
