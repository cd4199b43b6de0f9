"""The table of actions that the ranks of a pipeline execute, with its transfers, and when they free
what they send: what `plan/schedule_table.py` gives the engine, of as few microbatches as show what
is live at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from workbench.costmodel.inputs.config import FixedConfig, named_table
from workbench.schedules import (
    Action,
    Table,
    Transport,
    executable,
    generate,
    receives_early,
    send_ends,
)

FILLED = 4
"""Microbatches a rank after which a pipeline is full, under every schedule but GPipe: what is live
at once repeats.
"""


class ExecutedSchedule(NamedTuple):
    """The lowered table, and by row the index of the action before which what a send has is
    freed.
    """

    table: Table
    sends_end: tuple[Mapping[Action, int], ...]


def executed_schedule(s: FixedConfig, microbatches: int, reduces_each: bool) -> ExecutedSchedule:
    """Of a plan's schedule.

    Args:
        s: What the plan fixes.
        microbatches: Of a step, on all replicas that take them in turn.
        reduces_each: Whether gradients are reduced after every backward.
    """
    table = s.table or _named(s, enough_microbatches(s, microbatches))
    early = receives_early(s.schedule, s.transport)
    return lowered_schedule(table, reduces_each, early, s.transport, s.pair_groups)


@lru_cache(maxsize=32)
def lowered_schedule(
    table: Table, reduces_each: bool, early: bool, transport: Transport, pair_groups: bool
) -> ExecutedSchedule:
    """Of a table, whose receives are posted `early` or not."""
    lowered = executable(table, reduces_each, early)
    ends = (send_ends(lowered, rank, transport, pair_groups) for rank in range(lowered.ranks))
    return ExecutedSchedule(lowered, tuple(ends))


def _named(s: FixedConfig, microbatches: int) -> Table:
    """A named schedule; one stage has nothing to order."""
    if s.pipeline == 1 and not s.in_turn:
        return generate("1f1b", 1, microbatches)
    return named_table(s, microbatches)


def enough_microbatches(s: FixedConfig, microbatches: int) -> int:
    """As few microbatches of a step as show the most that is live, in turns of replicas."""
    if s.schedule == "gpipe" and s.pipeline > 1:
        return microbatches
    turn = lcm(*s.replicas) if s.in_turn else s.pipeline
    return min(microbatches, FILLED * max(s.pipeline, turn))
