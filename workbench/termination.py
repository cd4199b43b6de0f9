"""A process that is ended by a signal cleans up as one interrupted does: its child processes end,
and its temporary files go.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what Ctrl-C stops is stopped."""


def exit_code(interrupt: BaseException) -> int:
    """Exit code of a command that ends with `interrupt`, which may have it as its cause."""
    ended = isinstance(interrupt.__cause__ or interrupt, Terminated)
    return 128 + signal.SIGTERM if ended else INTERRUPTED


@contextmanager
def cleaned_up_when_ended() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM within it, and SystemExit on SIGHUP.

    By default either ends a process at once: what its child processes started may go on, and
    temporary folders stay. SIGHUP is no interrupt, for a run does not end with the terminal where
    it is waited for. A signal that the caller ignores (`nohup`) or handles is left alone, and one
    that comes during the clean-up is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler can be set
        return
    ours = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        if signal.getsignal(each) == _end:
            signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGTERM:
        raise Terminated
    sys.exit(128 + number)
