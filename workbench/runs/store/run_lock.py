"""Locks in a run directory: one process keeps its state, one writes the records of each rank.

A lock is the kernel's (flock) on an open file, which ends with its process, however that ends; the
file says whose it is. Without locks, as on some network file systems, nothing is refused.
"""

from __future__ import annotations

import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import IO

from workbench.errors import refuse

LOCK = ".lock"
"""File that the supervisor of a run locks, or its rank 0 where it was launched elsewhere."""


def lock_run(folder: Path) -> IO[str] | None:
    """Lock a run directory for whoever keeps its state.

    Returns:
        An open file, which holds the lock until it is closed; None where there are no locks.

    Raises:
        PlanError: Another process holds it; names the process.
    """
    return _lock(folder, folder / LOCK)


def lock_rank(folder: Path, rank: int) -> IO[str] | None:
    """Lock the records of a rank in a run directory, as `lock_run`."""
    with suppress(OSError):
        (folder / "telemetry").mkdir(exist_ok=True)
    return _lock(folder, folder / "telemetry" / f"rank{rank:05d}.lock")


def _lock(folder: Path, path: Path) -> IO[str] | None:
    try:
        file = path.open("a+", encoding="utf-8")  # closed on exec: no child holds it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            legal = "legal: to wait for its end, to stop it (`workbench stop`), or another folder"
            raise refuse("run", f"{folder} is in use by {holder}; {legal}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of {platform.node()}")
        file.flush()
        return file
    except OSError:
        return None
