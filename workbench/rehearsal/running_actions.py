"""Which actions of a schedule run, where microbatches that repeat each other are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from workbench.plan.rank_placement import rank_place, table_row
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import executed
from workbench.schedules import Action

EVERY = 2**31
STEPS = 2
"""The first step, and the first of the steady state."""
RUN_FIRST = (2, 3, EVERY)
"""Microbatches of a stage that run at the start of the first step: two to compare; where the first
allocates what stays, three; where they are not alike, all. A later step runs one fewer, and
compares with the step before.
"""
GRADIENTS_DONE = ("B", "W")
NO_MICROBATCH = -1


class RunCounter:
    """Counts actions that have run, of those that will; reports each.

    Args:
        plan: The plan.
        ranks: Ranks that are rehearsed one after another.
        report: Called with (actions done, actions in all); None: nothing is.
    """

    def __init__(
        self, plan: ResolvedPlan, ranks: Sequence[int], report: Callable[[int, int], None] | None
    ) -> None:
        table, pipeline = executed(plan)[0], plan.strategy.pipeline
        of_stages, in_turn = pipeline.replicas or (), pipeline.is_round_robin
        at = (table_row(rank_place(plan, rank), of_stages, in_turn) for rank in ranks)
        own = (table.rows[row] for row in at)
        self._until = list(accumulate(actions_that_run(row, table.stages, STEPS) for row in own))
        self._report = report or (lambda done, of: None)
        self._done, self._rank = 0, -1

    def of_rank(self) -> Callable[[], None]:
        """The next rank begins; what it calls after each action."""
        self._rank += 1
        self._done = self._until[self._rank - 1] if self._rank else 0
        return self._count

    def end(self) -> None:
        """All is done."""
        if self._done < self._until[-1]:
            self._report(self._until[-1], self._until[-1])

    def _count(self) -> None:
        # A rank whose microbatches are not alike runs more than was thought.
        if self._done < self._until[self._rank]:
            self._done += 1
            self._report(self._done, self._until[-1])


def actions_that_run(row: Sequence[Action], stages: int, steps: int) -> int:
    """Actions of the model that run in so many steps of a row, if its microbatches are alike."""
    firsts = RUN_FIRST[0], RUN_FIRST[0] - 1
    running = [running_microbatches(row, first, stages)[0] for first in firsts]
    often = [sum(a.is_compute and a.microbatch in each for a in row) for each in running]
    return often[0] + (steps - 1) * often[1]


def running_microbatches(
    row: Sequence[Action], first: int, stages: int
) -> tuple[frozenset[int], set[int]]:
    """(microbatches of a row that run: the `first` and the last of every action of a stage; indices
    of these last actions). The second loss of the last of so many `stages` is the first that is
    added to another: one more runs there.

    All run where a split backward shards each microbatch's gradients: which action of which
    microbatch allocates the unsharded ones depends on what ran before.
    """
    by_action: dict[tuple[str, int], list[int]] = {}
    for at, action in enumerate(row):
        by_action.setdefault((action.kind, action.stage), []).append(at)
    reductions = sum(action.kind == "REDUCE_GRAD" for action in row)
    is_split = any(action.kind == "W" for action in row)
    if is_split and reductions > len({action.stage for action in row}):
        first = EVERY
    first += any(action.stage == stages - 1 for action in row)
    ends = (at for found in by_action.values() for at in (*found[:first], found[-1]))
    running = (row[at].microbatch for at in ends)
    return (
        frozenset(NO_MICROBATCH if each is None else each for each in running),
        last_actions(row),
    )


def last_actions(row: Sequence[Action]) -> set[int]:
    """Indices of the last action of each kind and stage."""
    return set({(action.kind, action.stage): at for at, action in enumerate(row)}.values())


def microbatch_of_each(row: Iterable[Action]) -> Iterator[int]:
    """The microbatch of each action; of a reduction, that whose gradients are complete before."""
    complete: dict[int, int] = {}
    for action in row:
        if action.microbatch is None:
            yield complete.get(action.stage, NO_MICROBATCH)
            continue
        if action.kind in GRADIENTS_DONE:
            complete[action.stage] = action.microbatch
        yield action.microbatch
