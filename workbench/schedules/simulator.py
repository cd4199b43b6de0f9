"""Event simulation of a table: when each action runs, what idles, what deadlocks.

A rank takes its actions in order. It posts each transfer by itself when all that stands before has
run, and goes on; a transfer starts when both ends are posted. Compute waits for what it receives
when it reads it, and never for what it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from workbench.schedules.action import COMPUTE, RECVS, SENDS, Action, matching
from workbench.schedules.table import Row, Table

Durations = Mapping[str, Sequence[float]]
"""Kind -> seconds by stage. F is needed, and B or I with W; any other kind takes no time unless
given.
"""
Key = tuple[str, int, int | None]


Transport = Literal["gloo", "nccl", "rendezvous"]
"""How transfers progress. gloo: each by itself. nccl: those of one process group are kernels of one
stream, so that they run in the order in which a rank posts them. rendezvous: a rank goes on when
its transfer is over, the strictest reading of what a backend promises.
"""


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
    table: Table,
    durations: Durations,
    p2p_seconds: float = 0.0,
    *,
    transport: Transport = "gloo",
    pair_groups: bool = False,
) -> Timeline:
    """Run the table on a clock. Compute-only tables transfer at once where a stage hands over to
    another rank, whatever the transport.

    Args:
        table: Compute-only, or lowered.
        durations: Seconds by kind and stage.
        p2p_seconds: Seconds of each transfer.
        transport: How transfers progress.
        pair_groups: Each pair of ranks has a process group of its own, else all share one; counts
            for NCCL alone.

    Raises:
        Deadlock: Naming the action at which each rank is blocked.
    """
    if table.lowered:
        return _Clock(table, durations, p2p_seconds, transport, pair_groups).run()
    return _run_compute(table, durations, p2p_seconds)


def send_ends(
    table: Table, rank: int, transport: Transport, pair_groups: bool = False
) -> dict[Action, int]:
    """Send of `rank` -> index in its row of the first action that starts when the send is over, all
    forwards and backwards taking unit time; the row's length where none does.
    """
    timeline = _uniform_timeline(table, transport, pair_groups)
    own = {i.action: i for i in timeline.intervals if i.rank == rank}
    row = table.rows[rank]
    starts = [own[action].start for action in row]
    return {
        action: next((j for j in range(i + 1, len(row)) if starts[j] >= own[action].end), len(row))
        for i, action in enumerate(row)
        if action.kind in SENDS
    }


@lru_cache(maxsize=4)
def _uniform_timeline(table: Table, transport: Transport, pair_groups: bool) -> Timeline:
    """Of a lowered table; a rehearsal asks for each rank of one."""
    return simulate(table, uniform(table.stages), transport=transport, pair_groups=pair_groups)


def in_flight(table: Table) -> tuple[int, ...]:
    """Most microbatches (of one chunk each) whose activations a rank holds at once, by rank.

    A microbatch is held from its forward until its weight gradient; the order of a row alone
    decides it.
    """
    return tuple(_most_held(row, set(table.stages_of(rank))) for rank, row in enumerate(table.rows))


def in_flight_by_stage(table: Table) -> tuple[int, ...]:
    """Most microbatches whose activations a stage holds at once, by stage."""
    return tuple(
        max(_most_held(table.rows[home], {stage}) for home in table.homes(stage))
        for stage in range(table.stages)
    )


def _most_held(row: Row, stages: set[int]) -> int:
    held = most = 0
    for action in row:
        if action.stage in stages:
            held += (action.kind == "F") - (action.kind in ("B", "W"))
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
            away = need[1] != action.stage and table.home(*need[1:]) != rank
            start = max(start, done[need] + p2p if away else done[need])
        now = start + seconds_of(durations, action)
        done["I" if action.kind == "B" else action.kind, action.stage, action.microbatch] = now
        yield Interval(rank, action, start, now)


class _Clock:
    """State of one simulation of a lowered table."""

    def __init__(
        self,
        table: Table,
        durations: Durations,
        p2p: float,
        transport: Transport,
        pair_groups: bool,
    ) -> None:
        self.table, self.durations, self.p2p, self.transport = table, durations, p2p, transport
        self.pair_groups = pair_groups
        self.compute = [[a for a in row if not a.is_p2p] for row in table.rows]
        self.ends: list[list[float]] = [[] for _ in table.rows]
        """End of each rank's actions that are no transfer, as far as they have run."""
        self.queues = [self._queues(rank, row) for rank, row in enumerate(table.rows)]
        self.posted_after = {
            action: before
            for queues in self.queues
            for q in queues.values()
            for action, before in q
        }
        self.free = [dict.fromkeys(queues, 0.0) for queues in self.queues]
        self.unposted = [deque(queues) for queues in self.queues]
        """Streams of each rank, in the order of their first transfers, that nothing was posted
        on."""
        self.posted: list[dict[object, None]] = [{} for _ in table.rows]
        """Streams of each rank that may have transfers to run."""
        """When the stream of each queue is free."""
        self.done: dict[Key, float] = {}
        self.intervals: list[Interval] = []

    def _queues(self, rank: int, row: Row) -> dict[object, deque[tuple[Action, int]]]:
        """The transfers of a rank by stream, in order, each with the number of actions before."""
        queues: dict[object, deque[tuple[Action, int]]] = {}
        before = 0
        for action in row:
            if action.is_p2p:
                queues.setdefault(self._stream(rank, action), deque()).append((action, before))
            before += not action.is_p2p
        return queues

    def _stream(self, rank: int, action: Action) -> object:
        if self.transport == "gloo":
            return action
        other = matching(action)
        return self.table.home(other.stage, other.microbatch) if self.pair_groups else "all"

    def run(self) -> Timeline:
        progress = True
        while progress:
            ran = [self._compute(rank) for rank in range(self.table.ranks)]
            ran += [self._transfer(rank) for rank in range(self.table.ranks)]
            progress = any(ran)
        blocked = {
            rank: self._blocked_at(rank)
            for rank, row in enumerate(self.compute)
            if len(self.ends[rank]) < len(row) or any(self.queues[rank].values())
        }
        if blocked:
            raise Deadlock(blocked)
        return Timeline(
            tuple(sorted(self.intervals, key=lambda i: (i.rank, i.start))), self.table.ranks
        )

    def _compute(self, rank: int) -> bool:
        """Run what rank can run of its compute; whether that was anything."""
        row, ends = self.compute[rank], self.ends[rank]
        first = len(ends)
        while len(ends) < len(row):
            action = row[len(ends)]
            ready = self._ready(rank, action)
            if ready is None:
                break
            start = max(ends[-1] if ends else 0.0, ready)
            end = start + seconds_of(self.durations, action)
            ends.append(end)
            kind = "I" if action.kind == "B" else action.kind
            self.done[kind, action.stage, action.microbatch] = end
            self.intervals.append(Interval(rank, action, start, end))
        return len(ends) > first

    def _ready(self, rank: int, action: Action) -> float | None:
        """When what the action needs is there; None while it is not."""
        latest = 0.0
        if self.transport == "rendezvous":
            queue = self.queues[rank].get("all")
            if queue and queue[0][1] <= len(self.ends[rank]):
                return None
            latest = self.free[rank].get("all", 0.0)
        for need in needs(action, self.table.stages):
            if self.table.home(*need[1:]) != rank:
                need = ("RECV_F" if need[0] == "F" else "RECV_B", action.stage, action.microbatch)
            when = self.done.get(need)
            if when is None:
                return None
            latest = max(latest, when)
        return latest

    def _transfer(self, rank: int) -> bool:
        """Run the transfers whose two ends come next in their streams; whether there was one."""
        ran = False
        for stream in self._posted_streams(rank):
            queue = self.queues[rank][stream]
            while queue and self._run_transfer(rank, stream, queue[0][0]):
                ran = True
        return ran

    def _posted_streams(self, rank: int) -> list[object]:
        """Streams of a rank on which a transfer may have been posted; what gloo has one stream for
        each of, and most are not posted yet or are over, is not looked through again.
        """
        unposted, posted, queues = self.unposted[rank], self.posted[rank], self.queues[rank]
        while unposted:
            queue = queues[unposted[0]]
            if queue and queue[0][1] > len(self.ends[rank]):
                break
            posted[unposted.popleft()] = None
        for stream in [stream for stream in posted if not queues[stream]]:
            del posted[stream]
        return list(posted)

    def _run_transfer(self, rank: int, stream: object, action: Action) -> bool:
        other = matching(action)
        peer = self.table.home(other.stage, other.microbatch)
        theirs = self._stream(peer, other)
        queue = self.queues[peer].get(theirs)
        if not queue or queue[0][0] != other:
            return False
        posted = [self._posted(rank, stream, action), self._posted(peer, theirs, other)]
        if None in posted:
            return False
        end = max(when for when in posted if when is not None) + self.p2p
        for at, its_stream, one, when in (
            (rank, stream, action, posted[0]),
            (peer, theirs, other, posted[1]),
        ):
            self.queues[at][its_stream].popleft()
            self.free[at][its_stream] = end
            self.done[one.kind, one.stage, one.microbatch] = end
            self.intervals.append(Interval(at, one, when or 0.0, end))
        return True

    def _posted(self, rank: int, stream: object, action: Action) -> float | None:
        """When a transfer may start at this end; None while what stands before has not run."""
        before = self.posted_after[action]
        if len(self.ends[rank]) < before:
            return None
        return max(self.free[rank][stream], self.ends[rank][before - 1] if before else 0.0)

    def _blocked_at(self, rank: int) -> Action:
        """A transfer that the rank waits for, else the compute action at which it stands."""
        row, at = self.compute[rank], len(self.ends[rank])
        waiting_for = [q[0][0] for q in self.queues[rank].values() if q and q[0][1] <= at]
        receives = [a for a in waiting_for if a.kind in RECVS]
        return next(iter(receives or waiting_for), row[at] if at < len(row) else row[-1])


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
