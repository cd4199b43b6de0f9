"""A run from start to end, seen from this process and from another."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import REPOSITORY, processes_of, until
from workbench.plan.schema.written_plan import Plan
from workbench.runs import Reader, attach, list_runs


def test_a_run_returns_at_once_and_finishes(go: Callable[..., Any]) -> None:
    run = go(steps=100)
    assert not run.state.final
    state = run.wait(30)
    assert (state.phase, state.exit_code, state.cause) == ("finished", 0, None)
    assert {"plan.yaml", "accelerate.yaml", "command.json", "state.json", "events.jsonl"} <= {
        p.name for p in run.dir.iterdir()
    }
    assert run.plan.world_size == 3
    until(lambda: not processes_of(run))


def test_the_profile_is_what_the_ranks_wrote(go: Callable[..., Any]) -> None:
    run = go(steps=4)
    seen: list[Any] = []
    run.wait(30, progress=seen.extend)
    profile = run.profile()
    assert profile.source == "measured" and profile.run == run.id
    assert profile.loss == [3.0, 1.5, 1.0, 0.75]
    assert profile.peak_bytes_by_rank == {0: 5000, 1: 5001, 2: 5002}
    assert profile.by_category == {"parameters": 4000}
    assert profile.step_seconds == 0.02 and profile.tokens_per_second == 25600
    assert profile.capacity_bytes == int(run.plan.gpu.memory_gib * 2**30) and profile.fits
    assert sum(record["kind"] == "step" for record in seen) == 12


def test_another_process_attaches(go: Callable[..., Any]) -> None:
    run = go(steps=100)
    code = (
        f"from workbench.runs import attach; r = attach({str(run.dir)!r}); r.stop(); "
        f"print(r.wait(20).phase)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert told.stdout.split()[-1] == "stopped", told.stderr
    assert attach(run.dir).state.phase == "stopped"


def test_a_run_outlives_whoever_started_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kernel restart: the process that started the run is killed with its whole
    group.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    (tmp_path / "plan.yaml").write_text(plan.replace(**{"training.steps": 60}).to_yaml())
    code = f"""
import sys, time
from workbench.plan.schema import Plan
from workbench.runs import start
from workbench.runs.launch.accelerate_command import Recipe
launcher = (sys.executable, "-m", "tests.runs.light_launcher", "3", "none")
run = start(Plan.load({str(tmp_path / "plan.yaml")!r}), root={str(tmp_path / "runs")!r},
            _recipe=Recipe("tests.runs.stub_worker", launcher))
print(run.dir, flush=True)
time.sleep(60)
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    run = attach(starter.stdout.readline().strip())
    until(lambda: run.state.phase == "running")
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait(10)
    starter.stdout.close()
    assert not run.state.final
    assert run.wait(30).phase == "finished" and len(run.profile().loss) == 60
    until(lambda: not processes_of(run))


def test_runs_are_listed_latest_first(go: Callable[..., Any], tmp_path: Path) -> None:
    runs = [go(steps=1), go(steps=1)]
    for run in runs:
        run.wait(30)
    assert [run.id for run in list_runs(tmp_path / "runs")] == sorted(
        (run.id for run in runs), reverse=True
    )


def test_stop_ends_after_a_step(go: Callable[..., Any]) -> None:
    run = go(steps=500)
    until(lambda: any(r["kind"] == "step" for r in Reader(run.dir).poll()))
    run.stop()
    state = run.wait(30)
    assert (state.phase, state.exit_code) == ("stopped", 0)
    records = Reader(run.dir).poll()
    last = [
        max(r["step"] for r in records if r["kind"] == "step" and r["rank"] == rank)
        for rank in range(3)
    ]
    assert len(set(last)) == 1 and last[0] < 499
    assert sum(r["kind"] == "bye" for r in records) == 3


def test_a_rank_that_heeds_no_stop_is_ended(go: Callable[..., Any]) -> None:
    run = go("deaf", steps=5000)
    until(lambda: run.state.phase == "running")
    run.stop(grace_seconds=0.5)
    assert run.wait(30).phase == "stopped"
    assert "terminated" in [
        json.loads(line)["kind"] for line in (run.dir / "events.jsonl").read_text().splitlines()
    ]


def test_waiting_has_a_deadline(go: Callable[..., Any]) -> None:
    run = go(steps=500)
    with pytest.raises(TimeoutError, match=r"after 0\.2 s"):
        run.wait(0.2)
    run.stop()
    run.wait(30)


def test_a_run_shows_itself(go: Callable[..., Any]) -> None:
    run = go("raise:1:0")
    run.wait(30)
    assert "CUDA out of memory" in run._repr_html_() and "Traceback" not in repr(run)
