"""Progress of work in another process, which a press of a button ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

SHOWN_SECONDS = 0.5
"""At least so long between two reports."""


class Cancellable:
    """What long work calls with how far it is; raises `CancelledError` there once it is cancelled.

    Args:
        show: Called with (done, of), not too often.
    """

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show, self._cancelled, self._last = show, threading.Event(), time.monotonic()

    def cancel(self) -> None:
        """End the work at its next report."""
        self._cancelled.set()

    def __call__(self, done: int, of: int) -> None:
        if self._cancelled.is_set():
            raise CancelledError
        if time.monotonic() - self._last >= SHOWN_SECONDS:
            self._last = time.monotonic()
            self._show(done, of)
