"""Processes below this one: how they ended, and ending every one of them, for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from workbench.runs.store.process_identity import is_stopped

TERM_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
DEADLINE_SECONDS = 10.0
"""How long the kernel may take to end processes that were sent SIGKILL."""


def descendants() -> list[psutil.Process]:
    """Every process below this one that is more than a remnant."""
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def end_descendants(grace_seconds: float = 0.0) -> None:
    """SIGKILL every descendant, those included that appear meanwhile; first wait up to
    `grace_seconds` for them.

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


def wake_descendants() -> None:
    """Let every descendant go on that a signal has stopped."""
    for process in descendants():
        try:
            if is_stopped(process.pid):
                process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            continue


def reap(keep: int) -> None:
    """Collect adopted children that ended, so that no remnant stays; `keep` is somebody else's to
    collect.
    """
    for process in psutil.Process().children():
        if process.pid == keep or _alive(process):
            continue
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


def exit_code(launcher: subprocess.Popen[bytes] | None) -> int | None:
    """The launcher's exit code, -n for signal n: it has ended, but its threads may take a moment
    more.
    """
    try:
        return launcher.wait(TERM_SECONDS) if launcher else None
    except subprocess.TimeoutExpired:
        return None


def oom_kills() -> int:
    """Processes that this machine's kernel has ended for want of memory since it booted; 0 where it
    does not say.
    """
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


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
