"""Timing of calls: by a host clock on CPU, by events on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MOST_CALLS = 4096


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on `device`; `clock` is the host's, in seconds.

    `time.process_time` stops while other programs have the core: for one thread that never waits it
    is the wall time on an idle machine.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    def of(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of `calls` consecutive calls."""
        if self.device.type == "cuda":
            return self._events(call, calls)
        begin = self.clock()
        for _ in range(calls):
            call()
        return self.clock() - begin

    def window(self, call: Callable[[], object], seconds: float) -> float:
        """Seconds per call, over as many calls as fill `seconds`.

        A fixed time rather than a fixed number: ranks that share memory bandwidth stay busy until
        the last of them has been timed.
        """
        total, done, calls = 0.0, 0, 1
        while total < seconds and done < MOST_CALLS:
            total += self.of(call, calls)
            done += calls
            calls = max(1, min(2 * calls, int(done * (seconds - total) / max(total, 1e-9))))
        return total / done

    def _events(self, call: Callable[[], object], calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
