"""Ending every process below this one, for certain."""

from __future__ import annotations

import os
import signal
import time

import psutil

DEADLINE_SECONDS = 10.0
"""How long the kernel may take to end processes that were sent SIGKILL."""


def descendants() -> list[psutil.Process]:
    """Every process below this one that is more than a remnant."""
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def end_descendants(grace_seconds: float = 0.0) -> None:
    """SIGKILL every descendant, those included that appear meanwhile; first wait up to `grace_seconds` for them.

    Raises `TimeoutError` where one survives, which only the kernel can cause.
    """
    deadline = time.monotonic() + grace_seconds
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := descendants():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in left]} survived SIGKILL")
        for process in left:
            _kill(process)
        time.sleep(0.02)


def reap(keep: int) -> None:
    """Collect adopted children that ended, so that no remnant stays; `keep` is somebody else's to collect."""
    for process in psutil.Process().children():
        if process.pid == keep or _alive(process):
            continue
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
