"""A run directory belongs to one launch: another is refused by the process that holds it, and what
a dead one held is free.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import REPOSITORY, until
from workbench.engine.worker_lifecycle import train
from workbench.errors import PlanError
from workbench.interop.export import export
from workbench.plan.schema import Plan
from workbench.runs.launch.external_launcher import ExternalRun
from workbench.runs.run import Run
from workbench.runs.store.run_lock import lock_rank, lock_run
from workbench.runs.store.run_state import stored_state


def second_supervisor(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workbench.runs.launch.supervisor", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_a_second_supervisor_is_refused_by_the_pid_of_the_first(go: Callable[..., Any]) -> None:
    run: Run = go("none", steps=100)
    until(lambda: run.state.phase == "running")
    first = run.state.supervisor_pid
    refused = second_supervisor(run.dir)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{run.dir} is in use by process {first}" in refused.stderr
    assert run.state.supervisor_pid == first
    assert run.wait(60).phase == "finished"


@pytest.mark.parametrize("lock", [lock_run, lambda folder: lock_rank(folder, 1)])
def test_what_a_dead_process_held_is_free(lock: Callable[[Path], object], tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from workbench.runs.store import run_lock; "
        "held = run_lock.lock_run(Path(sys.argv[1])), run_lock.lock_rank(Path(sys.argv[1]), 1); "
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(PlanError, match=f"{tmp_path} is in use by process {holder.pid}.*legal: "):
        lock(tmp_path)
    lock_rank(tmp_path, 0)
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert lock(tmp_path) is not None


@pytest.mark.parametrize("of", ["run", "rank"])
def test_a_launch_by_hand_leaves_the_records_of_one_that_lives(
    of: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(plan, tmp_path)
    held = lock_run(tmp_path) if of == "run" else lock_rank(tmp_path, 0)
    records = tmp_path / "telemetry" / "rank00000.jsonl"
    records.parent.mkdir(exist_ok=True)
    records.write_text("of the launch that lives")
    assert train(tmp_path / "plan.yaml") == 1
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
    assert records.read_text() == "of the launch that lives"
    assert not (tmp_path / "state.json").exists() and held is not None


def test_a_launch_by_hand_holds_its_folder_until_it_ends(plan: Plan, tmp_path: Path) -> None:
    export(plan, tmp_path)
    kept = ExternalRun(tmp_path, 0)
    kept.begin(plan.resolve())
    refused = second_supervisor(tmp_path)
    assert refused.returncode == 2 and f"in use by process {os.getpid()}" in refused.stderr
    kept.end(0)
    assert stored_state(tmp_path).phase == "finished" and lock_run(tmp_path) is not None


def test_a_folder_in_which_nothing_can_be_locked_is_used_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock_run(tmp_path)
    lock_run(tmp_path / "gone" / "below")
