"""Round robin: whole microbatches in turn to the replicas of a stage (PipeDream, Narayanan et al.,
SOSP'19).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm

from workbench.schedules.generators import SCHEDULES, warm_up
from workbench.schedules.one_f_one_b import row_with_warm_up
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
        in_flight: Most microbatches whose activations a replica of each stage keeps; None: as many
            as the schedule has.

    Raises:
        ValueError: The schedule has no such rows, or a replica would have no microbatch.
    """
    row_of = SCHEDULES[name].replicated_row if name in SCHEDULES else None
    if row_of is None:
        raise ValueError(f"schedule {name!r} has no round robin; legal: {', '.join(takers())}")
    if microbatches < max(replicas):
        raise ValueError(f"microbatches = {microbatches}; at least {max(replicas)}, one a replica")
    held = in_flight and warm_up(name, len(replicas), in_flight, replicas)
    rows = [
        dealt
        for stage, count in enumerate(replicas)
        for dealt in _dealt(
            row_with_warm_up(stage, held[stage], microbatches)
            if held
            else row_of(stage, replicas, microbatches),
            count,
        )
    ]
    starts = (0, *accumulate(replicas))[:-1]
    return Table(tuple(rows), len(replicas), microbatches, starts, tuple(replicas))


def takers() -> tuple[str, ...]:
    """Schedules that `round_robin` knows."""
    return tuple(name for name, each in SCHEDULES.items() if each.replicated_row is not None)


def shortened(table: Table, most_actions: int) -> Table:
    """A table without its last microbatches, where it has more than `most_actions` F and B and its
    replicas take turns: what further ones add only repeats after as many as all replicas' have
    filled the pipeline twice.

    The numbers of both, divided by those of replicas, leave the same where that is possible.
    """
    turn = lcm(*table.replicas)
    most = max(most_actions // (2 * table.stages), 2 * sum(table.replicas))
    if not table.replicas or table.microbatches <= most:
        return table
    left = most - (most - table.microbatches) % turn
    microbatches = left if left >= 2 * sum(table.replicas) else most
    rows = [[a for a in row if (a.microbatch or 0) < microbatches] for row in table.rows]
    return replace(table, rows=tuple(map(tuple, rows)), microbatches=microbatches)


def _dealt(row: Row, replicas: int) -> list[Row]:
    """A stage's actions, dealt to its replicas by microbatch."""
    return [
        tuple(action for action in row if (action.microbatch or 0) % replicas == turn)
        for turn in range(replicas)
    ]
