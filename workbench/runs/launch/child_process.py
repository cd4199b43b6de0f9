"""Child processes for what needs torch: shells and notebooks load none and hold no CUDA context."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from workbench.errors import ChildError
from workbench.runs.launch.parent_death import SAFE_PATH, python_module

END_SECONDS = 3.0
"""How long a child may take to end by itself before it is killed."""


def python(
    module: str, arguments: Sequence[str], on_line: Callable[[str], None], threads: int = 1
) -> None:
    """Run `python -P -m module arguments` and wait for it.

    It runs in a session of its own, which is ended with all its processes if the caller is
    interrupted, and it dies with the caller (PR_SET_PDEATHSIG).

    Args:
        module: Module to run.
        arguments: Its command line.
        on_line: Called with each line of its output.
        threads: OpenMP threads of the child.

    Raises:
        ValueError: It ends with exit code 2 (usage); the message is its stderr.
        ChildError: It fails otherwise.
    """
    command = [
        *python_module("workbench.runs.launch.parent_death"),
        str(os.getpid()),
        *python_module(module),
    ]
    environment = {
        **os.environ,
        **SAFE_PATH,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for text in process.stdout:
                on_line(text.rstrip("\n"))
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            _ask_to_end(process.pid)
            raise
        finally:
            # Whatever the child started is in its process group. The leader is not reaped yet
            # (WNOWAIT above), so its number cannot have gone to a process of somebody else.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        errors.seek(0)
        stderr = errors.read().strip()
    if code == 2:
        raise ValueError(stderr)
    if code != 0:
        raise ChildError(f"{module} ended with {_words(code)}:\n{stderr[-4000:]}")


def _ask_to_end(pid: int) -> None:
    """Ask the child's session to end, and give it a moment."""
    os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return
        time.sleep(0.02)


def _words(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
