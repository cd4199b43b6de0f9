"""What the supervisor sees of each rank: its records, and whether its process lives, is stopped, or
works.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workbench.runs.diagnose.failure_advice import advise
from workbench.runs.diagnose.first_cause import stall_cause
from workbench.runs.diagnose.rank_status import RankStatus
from workbench.runs.diagnose.straggler import StragglerWatch
from workbench.runs.launch.process_tree import descendants
from workbench.runs.store.command_file import RunCommand
from workbench.runs.store.process_identity import exit_code
from workbench.runs.store.rank_logs import log_tail
from workbench.runs.store.run_state import Cause
from workbench.runs.store.telemetry_reader import Reader
from workbench.runtime_facts.phase_deadlines import SLOW_FACTOR

POLL_SECONDS = 0.5
"""Time between two looks at the ranks' processes."""
IDLE_SHARE = 0.05
"""A rank that uses less than this share of one core while it writes nothing is not working."""
GRACE_SECONDS = 5.0
"""How long after its deadline a collective may take to end its ranks, who then say what they waited
for.
"""
WAITING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
"""States of a process that waits for a core or a disk, if it does not work."""
SLOW_PHASES = ("building", "compiling", "checkpointing")
"""Phases in which ranks may wait for a disk, or for a compiler's processes."""


@dataclass
class _RankProcess:
    """One rank's process, and when it was last last_record of (monotonic seconds)."""

    process: psutil.Process | None
    last_record: float
    cpu: float = 0.0
    cpu_at_last_record: float = 0.0
    stopped: float | None = None
    """Since when its process is stopped."""


class RankWatch:
    """The ranks of the run in `folder`, seen from outside."""

    def __init__(self, folder: Path, command: RunCommand) -> None:
        self.folder = folder
        self.command = command
        limit = command.progress_seconds
        self.ranks = {rank: RankStatus(rank, deadline=limit) for rank in range(command.world_size)}
        self.started = time.monotonic()
        self._idle_start = 0.0
        """Seconds in which nothing of ranks that have not said hello worked, nor their launcher."""
        self._start_cpu: dict[int, float] = {}
        self._stragglers = StragglerWatch()
        self._reader = Reader(folder)
        self._processes: dict[int, _RankProcess] = {}
        self._last_poll = 0.0
        self._ended_since: float | None = None

    def poll(self) -> list[RankStatus]:
        """Read what is new; ranks that said hello just now."""
        arrived = [seen for record in self._reader.poll() if (seen := self._take_record(record))]
        now = time.monotonic()
        if now - self._last_poll >= POLL_SECONDS:
            if not self.all_here:
                self._count_idle(now - (self._last_poll or self.started))
            self._last_poll = now
            for rank in self._processes:
                self._inspect(rank, now)
        return arrived

    def warning(self) -> str:
        """What stands still now, though it may yet go on, or could not be saved, in words; empty
        where nothing is.
        """
        now, found = time.monotonic(), self.lasting_warnings
        for rank, live in self._processes.items():
            if (
                live.stopped is not None
                and not self._has_ended(rank)
                and now - live.stopped >= POLL_SECONDS
            ):
                pid = self.ranks[rank].pid
                found.append(
                    f"rank {rank} is frozen: its process is stopped (SIGSTOP); `kill -CONT {pid}` "
                    f"lets it go on"
                )
        return "; ".join(found)

    @property
    def lasting_warnings(self) -> list[str]:
        """Warnings that stand even at the run's end: why its last checkpoint could not be written,
        that its last loss is not finite, which rank is slow.
        """
        each = self.ranks.values()
        found = (
            next((seen.unsaved for seen in each if seen.unsaved), ""),
            next((seen.lost_loss for seen in each if seen.lost_loss), ""),
            self._stragglers.words(),
        )
        return [words for words in found if words]

    @property
    def all_here(self) -> bool:
        """Whether every rank said hello."""
        return len(self._processes) == len(self.ranks)

    @property
    def all_done(self) -> bool:
        """Whether every rank said bye."""
        return all(seen.bye for seen in self.ranks.values())

    @property
    def lingering(self) -> bool:
        """Whether the launcher should have ended by now: a rank is dead, or all are through, for
        too long.
        """
        ended = [self._has_ended(rank) for rank in self._processes]
        died = any(seen.gone and not seen.bye for seen in self.ranks.values())
        if not died and not (self.all_here and all(ended)):
            return False
        self._ended_since = self._ended_since or time.monotonic()
        return time.monotonic() - self._ended_since >= self.command.progress_seconds

    def verdict(self) -> Cause | None:
        """Why the run should be ended now: a rank that never came, or one that will not go on."""
        return self._absent() or self._frozen() or self._stalled() or self._looping()

    def _take_record(self, record: dict[str, Any]) -> RankStatus | None:
        rank = record["rank"]
        seen = self.ranks.get(rank)
        if seen is None:
            return None
        seen.take(record)
        self._stragglers.take(record)
        if record["kind"] == "hello":
            self._processes[rank] = _RankProcess(_process(record["pid"]), time.monotonic())
            return seen
        if rank in self._processes:
            live = self._processes[rank]
            live.last_record, live.cpu_at_last_record = time.monotonic(), live.cpu
        return None

    def _inspect(self, rank: int, now: float) -> None:
        live, seen = self._processes[rank], self.ranks[rank]
        try:
            if live.process is None or (status := live.process.status()) == psutil.STATUS_ZOMBIE:
                seen.exit_code = exit_code(
                    seen.pid or 0
                )  # as long as its parent, which may be stopped, has not asked
                raise psutil.NoSuchProcess(seen.pid or 0)
            live.cpu = sum(live.process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            seen.gone = seen.gone or time.time()
            return
        stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        live.stopped = (live.stopped or now) if stopped else None
        seen.stopped = stopped

    def _count_idle(self, seconds: float) -> None:
        """Count the last seconds as idle, unless a process that is starting has worked in them, or
        waits for a core or a disk: on a loaded machine a start may rightly take minutes.
        """
        here = {self.ranks[rank].pid for rank in self._processes}
        cpu: dict[int, float] = {}
        waits = False
        for process in descendants():
            if process.pid in here:
                continue
            with suppress(psutil.Error):
                cpu[process.pid] = sum(process.cpu_times()[:2])
                waits = waits or process.status() in WAITING
        used = sum(now - self._start_cpu.get(pid, 0.0) for pid, now in cpu.items())
        if not waits and used < IDLE_SHARE * seconds:
            self._idle_start += seconds
        self._start_cpu = cpu

    def _absent(self) -> Cause | None:
        """A rank that never came: nothing of the start has worked for so long, or none of it is
        over in ten times as long.
        """
        waited, limit = time.monotonic() - self.started, self.command.hello_seconds
        absent = [rank for rank in self.ranks if rank not in self._processes]
        if not absent or (self._idle_start < limit and waited < SLOW_FACTOR * limit):
            return None
        # Ranks wait for those that have not come as far; one that wrote nothing has not started.
        first = min(absent, key=lambda rank: (self.ranks[rank].joined, rank))
        names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        message = (
            f"{names} of {len(self.ranks)} never said hello within {waited:.0f} s of the launch, "
            f"{self._idle_start:.0f} s of them idle (rank {first}: {self.ranks[first].phase})"
        )
        advice = (
            "Look at its log. A start that rightly waits so long needs a larger "
            "telemetry.timeout_seconds."
        )
        return Cause(first, message, advice, log_tail(self.folder, first))

    def _frozen(self) -> Cause | None:
        """A rank whose process somebody stopped, for longer than a rank may be silent."""
        now, limit = time.monotonic(), self.command.progress_seconds
        for rank, live in self._processes.items():
            if (
                not self._has_ended(rank)
                and live.stopped is not None
                and now - max(live.stopped, live.last_record) >= limit
            ):
                return self._blame(
                    rank, f"is frozen: its process has been stopped for {now - live.stopped:.0f} s"
                )
        return None

    def _stalled(self) -> Cause | None:
        """Nobody writes and nobody works: the rank that is furthest behind holds the others.

        Ranks that wait for another in a collective have its deadline first, and say more.
        Not on GPUs: a rank that waits for NCCL keeps its core busy, and one that waits for its GPU
        may be right to. Not while files are read or written, which may be slow for good reasons;
        there the ranks' own timeouts hold.
        """
        now, limit = time.monotonic(), self.command.progress_seconds
        if len(self.ranks) > 1:
            limit += GRACE_SECONDS + max(seen.slowest for seen in self.ranks.values())
        open_ranks = [rank for rank in self._processes if not self._has_ended(rank)]
        if not open_ranks or self._ended_since or not self.all_here:
            return None
        if any(
            seen.on_gpu or seen.stopped or seen.phase in SLOW_PHASES
            for seen in (self.ranks[rank] for rank in open_ranks)
        ):
            return None
        silent = [now - self._processes[rank].last_record for rank in open_ranks]
        if min(silent) < limit or not all(self._is_idle(rank, now) for rank in open_ranks):
            return None
        words = f"no rank has done anything for {min(silent):.0f} s"
        slowest = _only_least({rank: (self.ranks[rank].step,) for rank in open_ranks})
        if slowest is None:
            return self._blame_nobody(open_ranks, words)
        return self._blame(slowest, f"is furthest behind, and {words}")

    def _looping(self) -> Cause | None:
        """Nobody writes, though some may work: no step of this run took near as long, and ranks'
        own deadlines are over.

        The rank that is furthest behind is blamed; of several, on CPU, one that works: the others
        wait for it.
        """
        now = time.monotonic()
        open_ranks = [rank for rank in self._processes if not self._has_ended(rank)]
        if (
            not open_ranks
            or self._ended_since
            or not self.all_here
            or any(self.ranks[r].stopped for r in open_ranks)
        ):
            return None
        if any(
            now - self._processes[rank].last_record < self._patience(rank) for rank in open_ranks
        ):
            return None
        if (known := stall_cause(self.folder, self.ranks)) is not None:
            return known
        silent = min(now - self._processes[rank].last_record for rank in open_ranks)
        words = f"no rank has written anything for {silent:.0f} s"
        slowest = _only_least(
            {
                rank: (
                    self.ranks[rank].step,
                    not self.ranks[rank].on_gpu and self._is_idle(rank, now),
                )
                for rank in open_ranks
            }
        )
        if slowest is None:
            return self._blame_nobody(open_ranks, words)
        at_work = "" if self.ranks[slowest].on_gpu else " and at work"
        deadline = f"the deadline of {self.ranks[slowest].doing} is {self._patience(slowest):.0f} s"
        return self._blame(slowest, f"is furthest behind{at_work}, and {words}: {deadline}")

    def _patience(self, rank: int) -> float:
        """How long, in seconds, a rank that is at work may write nothing, by what it is at.

        Where there are several, the deadlines of their collectives come first and say more.
        """
        seen, limit = self.ranks[rank], self.command.progress_seconds
        known = seen.step >= 0 and seen.phase not in (*SLOW_PHASES, "evaluating")
        alone = max(limit, SLOW_FACTOR * seen.slowest) if known else SLOW_FACTOR * limit
        return alone if len(self.ranks) == 1 else 2 * alone

    def _has_ended(self, rank: int) -> bool:
        return self.ranks[rank].bye or self.ranks[rank].gone is not None

    def _is_idle(self, rank: int, now: float) -> bool:
        """Whether it has not used a core since its last record."""
        live = self._processes[rank]
        used = live.cpu - live.cpu_at_last_record
        return used < IDLE_SHARE * (now - live.last_record)

    def _blame(self, rank: int, what: str) -> Cause:
        message = f"rank {rank} {what} ({self.ranks[rank].where})"
        return Cause(rank, message, advise(self.folder, message, rank), log_tail(self.folder, rank))

    def _blame_nobody(self, ranks: list[int], what: str) -> Cause:
        """Several ranks are equally far: which one holds the others is not known."""
        first = self.ranks[ranks[0]]
        message = f"{what}, and ranks are equally far ({first.where})"
        return Cause(None, message, advise(self.folder, message, ranks[0]))


def _only_least(keys: Mapping[int, tuple[float, ...]]) -> int | None:
    """The one rank with the least key; None where several have it."""
    least = [rank for rank, key in keys.items() if key == min(keys.values())]
    return least[0] if len(least) == 1 else None


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
