"""A child process: its words come line by line, its failures keep theirs, and nothing of it
outlives the caller.
"""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from workbench.errors import ChildError
from workbench.runs.launch import child_process


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a module of the given text importable by children; its name."""

    def write(text: str) -> str:
        (tmp_path / "a_child_program.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        return "a_child_program"

    return write


def test_lines_and_arguments(program: Callable[..., Any]) -> None:
    said: list[Any] = []
    child_process.python(
        program("import sys; print('one'); print(*sys.argv[1:])"), ["a", "b"], said.append
    )
    assert said == ["one", "a b"]


def test_exit_code_2_is_a_value_error_with_its_words(program: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^the field is wrong$"):
        child_process.python(
            program("import sys; print('the field is wrong', file=sys.stderr); sys.exit(2)"),
            [],
            print,
        )


@pytest.mark.parametrize(
    "ending, words",
    [
        ("raise RuntimeError('broken')", "exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_other_failures_say_what_was_said_last(
    program: Callable[..., Any], ending: str, words: str
) -> None:
    with pytest.raises(ChildError, match=words):
        child_process.python(program(ending), [], print)


HANGING = """
    import os, sys, time
    print("asking the driver", file=sys.stderr, flush=True)
    print(os.getpid(), flush=True)
    if len(sys.argv) > 1:
        os.close(1)
    elif os.fork():
        time.sleep(60)
    time.sleep(60)
"""


@pytest.mark.parametrize("arguments", [[], ["output closed"]])
def test_a_child_that_hangs_is_ended_at_its_deadline_with_its_last_words(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """The deadline passes when the child has said its line, so that a busy machine has time."""
    pids: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 * len(pids), sleep=time.sleep)
    monkeypatch.setattr(child_process, "time", clock)
    with pytest.raises(ChildError, match=r"was not done in 90 s:\nasking the driver$"):
        child_process.python(
            program(HANGING), arguments, lambda line: pids.append(int(line)), deadline_seconds=90
        )
    assert len(pids) == 1 and _gone(pids[0])


def test_words_without_a_line_end_and_in_no_encoding_come_too(program: Callable[..., Any]) -> None:
    said: list[str] = []
    text = "import os; os.write(1, b'one\\ntwo \\xff\\n\\nthree')"
    child_process.python(program(text), [], said.append, deadline_seconds=30)
    assert said == ["one", "two \ufffd", "", "three"]


SLEEPER = """
    import os, sys, time
    if os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_an_interrupt_ends_the_whole_session(program: Callable[..., Any]) -> None:
    pids = []

    def interrupt(line: str) -> None:
        pids.extend([int(line), *(p.pid for p in psutil.Process(int(line)).children())])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child_process.python(program(SLEEPER), [], interrupt)
    assert len(pids) == 2 and all(_gone(pid) for pid in pids)


def test_a_killed_caller_takes_its_child_along(program: Callable[..., Any]) -> None:
    name = program("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    call = (
        f"from workbench.runs.launch import child_process; "
        f"child_process.python({name!r}, [], lambda line: print(line, flush=True))"
    )
    caller = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    pid = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert _gone(pid)


def _gone(pid: int) -> bool:
    """Whether the process ends within a few seconds: a signal is delivered when the kernel comes to
    it.
    """
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_silent_end_is_said(program: Callable[..., Any]) -> None:
    with pytest.raises(ChildError, match=r"ended with exit code 7 and said no reason$"):
        child_process.python(program("import os; os._exit(7)"), [], print)
