"""Commands that are ended by a signal: their child processes and temporary folders go with them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from workbench import cli, verbs
from workbench.cli.commands import runs
from workbench.cli.progress import run_to_end
from workbench.engine.exit_codes import exit_status
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.runs.launch import child_process
from workbench.termination import Terminated, cleaned_up_when_ended

PLAN = """
model: {layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 260}
cluster: {gpu: local, gpus: 1}
training: {global_batch: 8, micro_batch: 2, sequence_length: 16}
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Both signals as a shell leaves them, whoever started the tests, and unchanged at the end."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    found = [signal.signal(each, handler) for each, handler in before.items()]
    assert found == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("verb", ["rehearse", "verify", "calibrate", "profile-layers"])
def test_an_ended_command_leaves_no_folder(
    verb: str, number: int, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = [] if verb == "calibrate" else [str(tmp_path / "plan.yaml")]

    def python(*_: Any, **__: Any) -> None:
        assert list(temporary.iterdir())
        send(number)

    monkeypatch.setattr(child_process, "python", python)
    monkeypatch.chdir(tmp_path)
    if number == signal.SIGTERM:
        assert cli.answer([verb, *words]) == 143
    else:
        with pytest.raises(SystemExit) as ended:
            cli.answer([verb, *words])
        assert ended.value.code == 129
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_a_child_started_ends_with_the_command(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's own child asks the kernel for nothing."""
    program = "import os, time\nos.fork() or time.sleep(60)\nprint(os.getpid(), flush=True)\n"
    (tmp_path / "a_child_that_forks.py").write_text(program + "time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found: list[psutil.Process] = []

    def end(line: str) -> None:
        child = psutil.Process(int(line))
        found.extend([child, *child.children()])
        send(number)

    with pytest.raises((Terminated, SystemExit)), cleaned_up_when_ended():
        child_process.python("a_child_that_forks", [], end)
    assert len(found) == 2 and not psutil.wait_procs(found, timeout=30)[1]


def test_ranks_and_their_folder_end_with_the_child_that_forked_them(temporary: Path) -> None:
    """The signal comes to all of them, as a command sends it."""

    def work(rank: int) -> None:
        (temporary / f"{os.getpid()}.rank").touch()
        while len(list(temporary.glob("*.rank"))) < 2:
            time.sleep(0.01)
        if rank == 0:
            others = {int(path.stem) for path in temporary.glob("*.rank")} - {os.getpid()}
            for pid in (os.getppid(), *others, os.getpid()):
                os.kill(pid, signal.SIGTERM)
        signal.pause()

    with pytest.raises(Terminated):
        exit_status(lambda: run_ranks(2, work) and None)
    ranks = [int(path.stem) for path in temporary.glob("*.rank")]
    assert len(ranks) == 2 and not any(psutil.pid_exists(pid) for pid in ranks)
    assert not [path for path in temporary.iterdir() if path.is_dir()]


class Waited:
    """A run that is waited for when the signal comes."""

    id = "a-run"
    dir = Path("a-run")
    state = SimpleNamespace(steps=1)

    def __init__(self, number: int) -> None:
        self.number, self.stopped = number, False

    def wait(self, seconds: float | None = None, **_: Any) -> Any:
        if not self.stopped:
            send(self.number)
        return self.state

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(("number", "stops"), [(signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_run_that_is_waited_for_stops_as_by_ctrl_c_and_outlives_its_terminal(
    number: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Waited(number)
    monkeypatch.setattr(verbs, "run", lambda *_, **__: run)
    monkeypatch.setattr(runs, "_show", lambda *_: None)
    words = ["run", "--model", "tiny", "--wait"]
    if stops:
        assert cli.answer(words) == 143
    else:
        with pytest.raises(SystemExit):
            cli.answer(words)
    assert run.stopped == stops


@pytest.mark.parametrize(("number", "stops"), [(signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_so_does_a_run_of_a_comparison(number: int, stops: bool) -> None:
    run: Any = Waited(number)
    with pytest.raises((Terminated, SystemExit)), cleaned_up_when_ended():
        run_to_end(run, "1 of 2")
    assert run.stopped == stops


def test_an_ignored_signal_stays_ignored_and_a_second_one_is() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cleaned_up_when_ended():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    cleaned = False
    with pytest.raises(Terminated), cleaned_up_when_ended():
        try:
            send(signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_a_child_that_is_asked_to_end_cleans_up(temporary: Path) -> None:
    def work() -> None:
        with tempfile.TemporaryDirectory():
            send(signal.SIGTERM)

    with pytest.raises(Terminated):
        exit_status(work)
    assert not list(temporary.iterdir())
