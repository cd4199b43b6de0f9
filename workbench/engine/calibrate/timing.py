"""Seconds of one call: by the wall clock on CPU, by events on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MOST_CALLS = 4096


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on `device`."""

    device: torch.device

    def of(self, call: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls, one after the other, take together."""
        if self.device.type == "cuda":
            return self._events(call, calls)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - begin

    def window(self, call: Callable[[], object], seconds: float, quickest: bool = False) -> float:
        """Seconds a call, of as many as fill `seconds`; or of the quickest part of them.

        A fixed time, not a fixed number: ranks that share cores must stay busy until the last of them has been timed.
        """
        total, done, calls, best = 0.0, 0, 1, float("inf")
        while total < seconds and done < MOST_CALLS:
            spent = self.of(call, calls)
            total, done, best = total + spent, done + calls, min(best, spent / calls)
            calls = max(1, min(2 * calls, int(done * (seconds - total) / max(total, 1e-9))))
        return best if quickest else total / done

    def _events(self, call: Callable[[], object], calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
