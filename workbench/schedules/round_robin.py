"""Round robin: whole microbatches in turn to the replicas of a stage (PipeDream, Narayanan et al.,
SOSP'19).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from workbench.schedules.generators import SCHEDULES
from workbench.schedules.named.one_f_one_b import row_with_warm_up
from workbench.schedules.table import Row, Table


def round_robin(
    name: str, replicas: Sequence[int], microbatches: int, in_flight: Sequence[int] | None = None
) -> Table:
    """The compute-only table of the schedule `name` on stages of `replicas`, a row a replica:
    replica j of r takes the microbatches m with m mod r = j.

    A stage's replicas keep the order of one row between them. What cannot deadlock as one rank a
    stage cannot do so with fewer orders to keep.

    Args:
        name: Of the schedule, one of `takers`.
        replicas: Of each stage.
        microbatches: Of a step.
        in_flight: Microbatches in flight by stage, on all its replicas, of a schedule that can be
            bounded; None: as many as it has.

    Raises:
        ValueError: The schedule has no such rows, or a replica would have no microbatch.
    """
    if name not in takers():
        raise ValueError(f"schedule {name!r} has no round robin; legal: {', '.join(takers())}")
    if microbatches < max(replicas):
        raise ValueError(f"microbatches = {microbatches}; at least {max(replicas)}, one a replica")
    return _table(name, tuple(replicas), microbatches, in_flight and tuple(in_flight))


def takers() -> tuple[str, ...]:
    """Schedules that `round_robin` knows."""
    return tuple(name for name, each in SCHEDULES.items() if each.replicated_row is not None)


@lru_cache(maxsize=16)
def _table(
    name: str, replicas: tuple[int, ...], microbatches: int, held: tuple[int, ...] | None
) -> Table:
    row_of = SCHEDULES[name].replicated_row
    assert row_of is not None
    rows = [
        row_with_warm_up(stage, held[stage], microbatches)
        if held
        else row_of(stage, replicas, microbatches)
        for stage in range(len(replicas))
    ]
    dealt = [own for row, count in zip(rows, replicas) for own in _dealt(row, count)]
    starts = (0, *accumulate(replicas))[:-1]
    return Table(tuple(dealt), len(replicas), microbatches, starts, replicas)


def _dealt(row: Row, replicas: int) -> list[Row]:
    """A stage's actions, dealt to its replicas by microbatch."""
    return [
        tuple(action for action in row if (action.microbatch or 0) % replicas == turn)
        for turn in range(replicas)
    ]
