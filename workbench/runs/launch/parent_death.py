"""Processes that end when their parent does, so that no rank outlives its run.

Linux sends a chosen signal to a process when its parent's *thread* ends (PR_SET_PDEATHSIG): whoever
starts such a process must do so from a thread that lives as long as it should, the main one. As a
program, `python -m workbench.runs.launch.parent_death PARENT_PID COMMAND...` ties itself to its
parent and becomes COMMAND.

`python -m` puts the current folder first on the path of imports: a file beside a plan with a
package's name would run in its place. Every child of ours leaves that folder out (`-P`), and has
its own children do so (`SAFE_PATH`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "WORKBENCH_LAUNCHER_PID"
"""Set by the shim for the launcher's children: the process id that their parent must have."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment in which `python -m` does not import from the current folder."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def python_module(name: str) -> list[str]:
    """The command `python -m name`, without the current folder on the path of imports."""
    return [sys.executable, "-P", "-m", name]


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies; call it before anything slow is
    imported.

    `parent` is the process id expected; default: the launcher's, where a run was started by
    `workbench`, else whoever is the parent now. A process whose parent died before the request took
    effect kills itself.
    """
    expected = parent or int(os.environ.pop(LAUNCHER, "0")) or os.getppid()
    if sys.platform != "linux":
        return
    # SIGKILL: a rank that hangs in a collective does not come to handle SIGTERM.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above, which then waits for a death that is past.
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none is lost from
    sight.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def main() -> None:
    """Tie this process to the parent named first, then become the command that follows."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    os.environ[LAUNCHER] = str(os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
