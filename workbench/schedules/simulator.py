"""Event simulation of a table: when each action runs, what idles, what deadlocks.

A rank takes its actions in order. Point-to-point actions that stand side by side are posted
together, as the executor does with one `batch_isend_irecv`; a transfer starts when both ends are
posted. A rank goes on when what it receives has arrived; its sends must have left before it posts
the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from workbench.schedules.action import COMPUTE, RECVS, SENDS, Action, matching
from workbench.schedules.table import Row, Table

Durations = Mapping[str, Sequence[float]]
"""Kind -> seconds by stage. F is needed, and B or I with W; any other kind takes no time unless
given.
"""
Key = tuple[str, int, int | None]


class Deadlock(ValueError):
    """No rank can go on; `blocked` maps each stuck rank to the action at which it stands."""

    def __init__(self, blocked: dict[int, Action]) -> None:
        self.blocked = blocked
        stuck = ", ".join(f"rank {rank} at {action}" for rank, action in sorted(blocked.items()))
        super().__init__(f"the schedule deadlocks: {stuck}")


class Interval(NamedTuple):
    """One action on the clock: seconds from the step's start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation gives: intervals, sorted by rank and then by start."""

    intervals: tuple[Interval, ...]
    ranks: int

    @cached_property
    def makespan(self) -> float:
        """Seconds from the common start of the step to its common end."""
        return max((i.end for i in self.intervals), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute, by rank."""
        busy = [0.0] * self.ranks
        for i in self.compute:
            busy[i.rank] += i.end - i.start
        return tuple(busy)

    @property
    def compute(self) -> list[Interval]:
        """Intervals that run the model."""
        return [i for i in self.intervals if i.action.kind in COMPUTE]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Makespan less compute, by rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The worst rank's bubble."""
        return max(self.bubbles)

    @property
    def own_bubbles(self) -> tuple[float, ...]:
        """Idle seconds between a rank's own first start and last end, by rank."""
        spans = [[i for i in self.compute if i.rank == rank] for rank in range(self.ranks)]
        return tuple(
            max(i.end for i in s) - min(i.start for i in s) - b for s, b in zip(spans, self.busy)
        )


def uniform(
    stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0
) -> dict[str, list[float]]:
    """Durations that are the same on every stage, in seconds."""
    return {
        k: [v] * stages
        for k, v in (("F", forward), ("I", input), ("W", weight), ("B", input + weight))
    }


def simulate(
    table: Table, durations: Durations, p2p_seconds: float = 0.0, *, rendezvous: bool = False
) -> Timeline:
    """Run the table on a clock. Compute-only tables transfer at once where a stage hands over to
    another rank.

    `rendezvous`: a rank also waits for its sends before going on, the strictest transport there is.
    Raises Deadlock naming the blocked actions.
    """
    if table.lowered:
        return _Clock(table, durations, p2p_seconds, rendezvous).run()
    return _run_compute(table, durations, p2p_seconds)


def in_flight(table: Table) -> tuple[int, ...]:
    """Most microbatches (of one chunk each) whose activations a rank holds at once, by rank.

    A microbatch is held from its forward until its weight gradient; the order of a row alone
    decides it.
    """
    return tuple(_most_held(row, set(table.stages_of(rank))) for rank, row in enumerate(table.rows))


def in_flight_by_stage(table: Table) -> tuple[int, ...]:
    """Most microbatches whose activations a stage holds at once, by stage."""
    return tuple(
        _most_held(table.rows[table.placement[stage]], {stage}) for stage in range(table.stages)
    )


def _most_held(row: Row, stages: set[int]) -> int:
    held = most = 0
    for action in row:
        if action.stage in stages:
            held += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, held)
    return most


def waiting(table: Table) -> tuple[int, ...]:
    """How many of `in_flight` wait for weight gradients alone, by rank; the fewest where that is
    reached often.
    """
    return tuple(_waiting(row) for row in table.rows)


def _waiting(row: Row) -> int:
    held = aside = 0
    largest = (0, 0)
    for action in row:
        held += (action.kind == "F") - (action.kind in ("B", "W"))
        aside += (action.kind == "I") - (action.kind == "W")
        largest = max(largest, (held, -aside))
    return -largest[1]


def most_losses(table: Table) -> int:
    """Most microbatches of the last stage whose loss has not run backward yet."""
    held = most = 0
    for action in table.rows[table.placement[-1]]:
        if action.stage == table.stages - 1:
            held += (action.kind == "F") - (action.kind in ("B", "I"))
            most = max(most, held)
    return most


def seconds_of(durations: Durations, action: Action) -> float:
    """Seconds that an action takes; B is I + W where no B is given."""
    if action.kind == "B" and "B" not in durations:
        return durations["I"][action.stage] + durations["W"][action.stage]
    by_stage = (
        durations[action.kind] if action.kind in ("F", "I", "W") else durations.get(action.kind)
    )
    return by_stage[action.stage] if by_stage is not None else 0.0


def _run_compute(table: Table, durations: Durations, p2p: float) -> Timeline:
    """The simulation of a compute-only table: no transfers to post, so a plain walk, kept quick for
    sliders.
    """
    done: dict[Key, float] = {}
    walks = [_walk(table, rank, durations, p2p, done) for rank in range(table.ranks)]
    intervals: list[list[Interval]] = [[] for _ in table.rows]
    going = list(range(table.ranks))
    while going:
        before = len(done)
        for rank in list(going):
            for interval in walks[rank]:
                if interval is None:
                    break
                intervals[rank].append(interval)
            else:
                going.remove(rank)
        if going and len(done) == before:
            raise Deadlock({rank: table.rows[rank][len(intervals[rank])] for rank in going})
    return Timeline(tuple(i for row in intervals for i in row), table.ranks)


def _walk(
    table: Table, rank: int, durations: Durations, p2p: float, done: dict[Key, float]
) -> Iterator[Interval | None]:
    """The intervals of one rank; None each time it must wait for another. Ends are noted in
    `done`.
    """
    now = 0.0
    for action in table.rows[rank]:
        start = now
        for need in needs(action, table.stages):
            while need not in done:
                yield None
            away = need[1] != action.stage and table.placement[need[1]] != rank
            start = max(start, done[need] + p2p if away else done[need])
        now = start + seconds_of(durations, action)
        done["I" if action.kind == "B" else action.kind, action.stage, action.microbatch] = now
        yield Interval(rank, action, start, now)


class _Clock:
    """State of one simulation of a lowered table."""

    def __init__(self, table: Table, durations: Durations, p2p: float, rendezvous: bool) -> None:
        self.table, self.durations, self.p2p, self.rendezvous = table, durations, p2p, rendezvous
        self.now = [0.0] * table.ranks
        self.done: dict[Key, float] = {}
        self.posted: dict[Action, float] = {}
        self.leaving: list[list[Action]] = [[] for _ in table.rows]
        self.intervals: list[list[Interval]] = [[] for _ in table.rows]
        self.queues = [deque(batches(row)) for row in table.rows]

    def run(self) -> Timeline:
        progress = True
        while progress:
            progress = False
            for rank, queue in enumerate(self.queues):
                while queue and self._take(rank, queue[0]):
                    queue.popleft()
                    progress = True
        if any(self.queues):
            raise Deadlock(
                {rank: self._stuck_at(queue[0]) for rank, queue in enumerate(self.queues) if queue}
            )
        return Timeline(tuple(i for row in self.intervals for i in row), self.table.ranks)

    def _stuck_at(self, item: Row) -> Action:
        """The action of a batch that waits: an unmatched receive, else an unmatched send."""
        unmatched = [a for a in item if a.is_p2p and matching(a) not in self.posted]
        return next((a for a in unmatched if a.kind in RECVS), (*unmatched, *item)[0])

    def _take(self, rank: int, item: Row) -> bool:
        return self._transfer(rank, item) if item[0].is_p2p else self._compute(rank, item[0])

    def _compute(self, rank: int, action: Action) -> bool:
        ready = self._ready(rank, action)
        if ready is None:
            return False
        start = max(self.now[rank], ready)
        self.now[rank] = end = start + seconds_of(self.durations, action)
        self.done[action.kind if action.kind != "B" else "I", action.stage, action.microbatch] = end
        self.intervals[rank].append(Interval(rank, action, start, end))
        return True

    def _ready(self, rank: int, action: Action) -> float | None:
        """When what the action needs is there; None while it is not."""
        latest = 0.0
        for need in needs(action, self.table.stages):
            if self.table.placement[need[1]] != rank:
                need = ("RECV_F" if need[0] == "F" else "RECV_B", action.stage, action.microbatch)
            when = self.done.get(need)
            if when is None:
                return None
            latest = max(latest, when)
        return latest

    def _transfer(self, rank: int, batch: Row) -> bool:
        if batch[0] not in self.posted and not self._post(rank, batch):
            return False
        awaited = batch if self.rendezvous else [a for a in batch if a.kind in RECVS]
        ends = [self._arrival(a) for a in awaited]
        if any(end is None for end in ends):
            return False
        for action, end in zip(awaited, ends):
            self.done[action.kind, action.stage, action.microbatch] = end or 0.0
        start, self.now[rank] = self.now[rank], max([self.now[rank], *(end or 0.0 for end in ends)])
        self.intervals[rank] += [Interval(rank, a, start, self._arrival(a) or start) for a in batch]
        self.leaving[rank] = [a for a in batch if a.kind in SENDS]
        return True

    def _post(self, rank: int, batch: Row) -> bool:
        left = [self._arrival(a) for a in self.leaving[rank]]
        if any(end is None for end in left):
            return False
        self.now[rank] = max([self.now[rank], *(end or 0.0 for end in left)])
        for action in batch:
            self.posted[action] = self.now[rank]
        return True

    def _arrival(self, action: Action) -> float | None:
        """When a posted transfer is over; None while its other end is not posted."""
        there = self.posted.get(matching(action))
        return None if there is None else max(there, self.posted[action]) + self.p2p


def batches(row: Row) -> Iterator[Row]:
    """A row cut as the executor runs it: point-to-point actions side by side are one item, all
    others one each.
    """
    for p2p, group in groupby(row, key=lambda a: a.is_p2p):
        if p2p:
            yield tuple(group)
        else:
            yield from ((action,) for action in group)


def needs(action: Action, stages: int) -> tuple[Key, ...]:
    """What must be done before a compute action; "I" stands for the input gradient, which B gives
    too.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage > 0 else ()
    if kind in ("I", "B"):
        own = ("F", stage, microbatch)
        return (own, ("I", stage + 1, microbatch)) if stage < stages - 1 else (own,)
    return (("I", stage, microbatch),) if kind == "W" else ()
