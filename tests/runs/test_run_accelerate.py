"""The real launcher: `accelerate launch` starts the ranks, keeps their streams apart, and reports
who failed.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs.conftest import REPOSITORY, processes_of, until
from workbench.plan.schema import Plan
from workbench.runs import Reader, start
from workbench.runs.launch.accelerate_command import Recipe
from workbench.runs.run import Run


@pytest.fixture
def run(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    plan = plan.replace(
        **{"cluster.gpus": 2, "training.steps": 500, "name": "a plan; with 'odd' letters"}
    )
    run = start(
        plan, root=tmp_path / "runs and more", _recipe=Recipe(module="tests.runs.stub_worker")
    )
    yield run
    until(lambda: not processes_of(run), seconds=10)


def stepping(run: Run) -> dict[int, int]:
    """Process ids by rank once two ranks take steps."""

    def both() -> dict[int, int] | None:
        records = Reader(run.dir).poll()
        if {r["rank"] for r in records if r["kind"] == "step"} == {0, 1}:
            return {r["rank"]: r["pid"] for r in records if r["kind"] == "hello"}
        return None

    pids: dict[int, int] = until(both, seconds=90)
    return pids


@pytest.mark.slow
def test_two_ranks_start_and_stop(run: Run) -> None:
    stepping(run)
    run.stop()
    state = run.wait(60)
    assert (state.phase, state.exit_code) == ("stopped", 0)
    assert sum(record["kind"] == "bye" for record in Reader(run.dir).poll()) == 2


@pytest.mark.slow
def test_a_killed_rank_is_named_from_the_launchers_report(run: Run) -> None:
    os.kill(stepping(run)[1], signal.SIGKILL)
    state = run.wait(90)
    assert state.cause is not None
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "rank 1 was killed by SIGKILL" in state.cause.message


@pytest.mark.slow
def test_nothing_of_accelerate_outlives_the_supervisor(run: Run) -> None:
    stepping(run)
    assert run.state.supervisor_pid is not None
    os.kill(run.state.supervisor_pid, signal.SIGKILL)
    until(lambda: not processes_of(run), seconds=5)
    assert run.state.phase == "failed"


def listening(process: Any) -> Any:
    """Addresses on which a process and what it started listen."""
    everything = [process, *process.children(recursive=True)]
    found = [connection for one in everything for connection in one.net_connections("inet")]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.slow
def test_nothing_of_a_run_listens_on_a_network(plan: Plan, tmp_path: Path) -> None:
    changes = {"cluster.gpus": 2, "training.steps": 100000, "training.sequence_length": 32}
    run = start(plan.replace(**changes), root=tmp_path / "runs")
    stepping(run)
    assert listening(psutil.Process(run.state.supervisor_pid)) == {"127.0.0.1"}
    run.stop()
    assert run.wait(60).phase == "stopped"
