"""1F1B: one forward, one backward (PipeDream-flush, 2104.04473), after a warm-up by DAPPLE's policy
PA or PB (early backward, 2007.01045).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from workbench.schedules.action import Action
from workbench.schedules.named.pipeline_schedule import (
    Number,
    PipelineSchedule,
    smaller,
    unsplit_bubble,
)
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


def replicated_warm_up(replicas: Sequence[int], on_the_way: int = 0) -> tuple[int, ...]:
    """Microbatches in flight by stage, on all its replicas together, which take them in turn: one
    on each, and those of the stages after it.

    They are rounded up to as many on every replica. PipeDream's number of active minibatches
    (Narayanan et al., SOSP'19) is the same without rounding; then a replica whose forward and
    backward wait for each other holds up the others: simulated, replicas [1, 3, 1] of balanced
    stages take twice as long, and of 300 drawn ones a tenth over 1.8 times.

    Args:
        replicas: Of each stage.
        on_the_way: Microbatches that each replica is being sent, besides.
    """
    held: list[int] = []
    after = 0
    for own in reversed(replicas):
        held.append(own * (1 - -after // own))
        after = held[-1] + on_the_way * own
    return tuple(reversed(held))


def _by_policy(on_the_way: int) -> PipelineSchedule:
    """The schedule in which each rank has a microbatch in flight for itself and for every later
    rank, and so many on the way to each of these: transfers are hidden behind compute.
    """

    def held(rank: Number, p: Number) -> Number:
        return (1 + on_the_way) * (p - rank) - on_the_way

    return PipelineSchedule(
        lambda rank, p, m, chunks: row_with_warm_up(rank, held(rank, p), m),
        unsplit_bubble,
        lambda rank, p, m, chunks: smaller(m, held(rank, p)),
        lambda stage, replicas, m: row_with_warm_up(
            stage, replicated_warm_up(replicas, on_the_way)[stage], m
        ),
        warm_up=lambda replicas: replicated_warm_up(replicas, on_the_way),
        pair_groups=on_the_way > 0,
        receives_early=on_the_way > 0,
    )


ONE_F_ONE_B = _by_policy(0)
"""Policy PA: as many in flight as there are ranks from this one on, enough where transfers take no
time.
"""
EAGER_1F1B = _by_policy(1)
"""Policy PB, "eager-1F1B" of 2211.05322: 1F1B of a pipeline in which each transfer is a stage of
its own, so that transfers run beside compute. In one process group, NCCL's order of transfers would
undo that.
"""
