"""Child processes for what needs torch: shells and notebooks load none and hold no CUDA context."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from workbench.errors import ChildError
from workbench.runs.launch.parent_death import SAFE_PATH, python_module

END_SECONDS = 3.0
"""How long a child may take to end by itself before it is killed."""


def python(
    module: str,
    arguments: Sequence[str],
    on_line: Callable[[str], None],
    threads: int = 1,
    deadline_seconds: float | None = None,
) -> None:
    """Run `python -P -m module arguments` and wait for it.

    It runs in a session of its own, which is ended with all its processes if the caller is
    interrupted, and it dies with the caller (PR_SET_PDEATHSIG).

    Args:
        module: Module to run.
        arguments: Its command line.
        on_line: Called with each line of its output.
        threads: OpenMP threads of the child.
        deadline_seconds: When it is killed; a child that a driver holds is left behind then. None:
            it may take as long as it likes.

    Raises:
        ValueError: It ends with exit code 2 (usage); the message is its stderr.
        ChildError: It fails otherwise, or is not done by the deadline.
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
    end = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    late = False
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for text in _lines(process.stdout, end):
                on_line(text)
            _await_end(process.pid, end)
        except TimeoutError:
            late = True
        except BaseException:
            _ask_to_end(process.pid)
            raise
        finally:
            # Whatever the child started is in its process group. The leader is not reaped yet
            # (WNOWAIT below), so its number cannot have gone to a process of somebody else.
            os.killpg(process.pid, signal.SIGKILL)
            code = _reap(process, END_SECONDS if late else None)
        errors.seek(0)
        stderr = errors.read().strip()
    if late:
        raise ChildError(f"{module} was not done in {deadline_seconds:g} s{_said(stderr)}")
    if code == 2:
        raise ValueError(stderr)
    if code != 0:
        said = _said(stderr) or " and said no reason"
        raise ChildError(f"{module} ended with {_words(code)}{said}")


def _lines(output: IO[bytes], end: float | None) -> Iterator[str]:
    """Lines of `output`; raises TimeoutError at `end`, of the monotonic clock."""
    rest = b""
    with output, selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and (left <= 0 or not ready.select(left)):
                raise TimeoutError
            chunk = os.read(output.fileno(), 2**16)
            *whole, rest = (rest + chunk).split(b"\n")
            if not chunk and rest:
                whole = [rest]
            yield from (line.decode(errors="replace") for line in whole)
            if not chunk:
                return


def _await_end(pid: int, end: float | None) -> None:
    """Wait for the child, without reaping it; raises TimeoutError at `end`."""
    if end is None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    elif not _has_ended(pid, end):
        raise TimeoutError


def _has_ended(pid: int, end: float) -> bool:
    """Whether the child ends before `end`; it is not reaped."""
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return bool(ended)


def _reap(process: subprocess.Popen[bytes], seconds: float | None) -> int:
    """The exit code; a killed process that the kernel does not let go counts as killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _ask_to_end(pid: int) -> None:
    """Ask the child's session to end, and give it a moment."""
    os.killpg(pid, signal.SIGTERM)
    _has_ended(pid, time.monotonic() + END_SECONDS)


def _said(stderr: str) -> str:
    """The end of what was said, behind a colon; "" where nothing was."""
    return f":\n{stderr[-4000:]}" if stderr else ""


def _words(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def progress_record(text: str) -> dict[str, Any] | None:
    """The record in a line that says how far a child is: `done`, `of` and what the child adds; None
    for any other line, as what a user's model prints itself.
    """
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    known = all(isinstance(record.get(key), int | float) for key in ("done", "of"))
    return record if known else None
