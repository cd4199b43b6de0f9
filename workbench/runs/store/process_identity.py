"""Identity of a process: its number and start time, which tell it from a later process with the
same number even when the clock is set.

A start time in seconds since the epoch moves when the clock is set, one in ticks since boot does
not. Both need the number to be asked where it was given: on the same boot of the same kernel, in
the same PID namespace.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import psutil

CLOCK_SECONDS = 3.0
"""How far two readings of one process's start may differ when the clock is set in between."""
STOPPED = ("T", "t")
"""States of a process that a signal, or a debugger, has stopped."""
DEAD = ("Z", "X", "x")
_STATE, _START, _EXIT = 0, 19, 49
"""Places after the command's name in /proc/PID/stat (proc(5): fields 3, 22 and 52)."""


@cache
def pid_space() -> str:
    """Where process numbers mean the same: boot and PID namespace; empty where the system does not
    say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None where it is gone, or the system
    does not say.
    """
    fields = _stat(pid)
    return int(fields[_START]) if fields and fields[_STATE] not in DEAD else None


def is_stopped(pid: int) -> bool:
    """Whether process `pid` stands still because a signal (SIGSTOP) or a debugger has stopped
    it.
    """
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] in STOPPED


def exit_code(pid: int) -> int | None:
    """How process `pid` ended, -n for signal n, while its parent has not asked; None where that is
    not known.
    """
    fields = _stat(pid)
    if not fields or fields[_STATE] not in DEAD or len(fields) <= _EXIT:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT]))


def created(pid: int) -> float | None:
    """When process `pid` started, epoch seconds; None where there is no such process, or only its
    remains.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def is_process(pid: int | None, started: float | None) -> bool:
    """Whether `pid` is alive and still the process that started then, not a later one with the same
    number.
    """
    if pid is None or started is None:
        return False
    now = created(pid)
    return now is not None and abs(now - started) <= CLOCK_SECONDS


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may hold anything; none where there is no such
    process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
