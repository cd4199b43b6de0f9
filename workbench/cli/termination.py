"""A command that is ended (SIGTERM) removes its temporary files, as one interrupted does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cleaned_up_when_ended() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within it; a process otherwise leaves its temporary folders."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler can be set
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
