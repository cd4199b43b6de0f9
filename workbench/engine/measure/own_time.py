"""Seconds that a CPU rank computes in a step, by phase: without its waits for other ranks, and
without the time for which it could have run and had no core.

Ranks of one job end a step together, however slow one of them is: only its own time tells which.
Other processes on a loaded machine take cores from all ranks by turns, which Linux counts
(`/proc/self/schedstat`, run delay): it is no rank's own. A sleep, a page fault or a slow disk is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workbench.vocabulary import PHASES_OF_ACTIONS

_SCHEDSTAT = Path("/proc/self/schedstat")
"""Nanoseconds on a core, nanoseconds of waiting for one, and turns, of the main thread."""


class OwnClock:
    """A clock of the main thread that stands still while it waits for a core, or for another rank
    (`watching`).
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self._schedstat: int | None = None

    def now(self) -> float:
        """Seconds since a moment of the past, while `watching`."""
        return self._on_core() - self._waited

    def _on_core(self) -> float:
        delay = b"0 0 0" if self._schedstat is None else os.pread(self._schedstat, 64, 0)
        return time.perf_counter() - int(delay.split()[1]) / 1e9

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which waits for collectives and transfers are seen."""
        method = vars(dist.Work)["wait"]

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            began = self._on_core()
            try:
                return method(work, *args, **kwargs)
            finally:
                self._waited += self._on_core() - began

        watched: Any = dist.Work
        with suppress(OSError):  # not of Linux, or a kernel that does not count it
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
        watched.wait = wait
        try:
            yield
        finally:
            watched.wait = method
            if self._schedstat is not None:
                os.close(self._schedstat)
                self._schedstat = None


class PhaseTimes:
    """Own seconds of a step by phase; a phase lasts until the next one begins.

    Args:
        clock: The rank's.
        since: When its own time of this step began; then when the phase did.
    """

    def __init__(self, clock: OwnClock, since: float) -> None:
        self._clock, self.since, self._phase = clock, since, "other"
        self.seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """An action begins, of the kind or label `name`."""
        self.enter(PHASES_OF_ACTIONS.get(name, "other"))

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it ends."""
        now = self._clock.now()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + max(0.0, now - self.since)
        self.since, self._phase = now, phase
