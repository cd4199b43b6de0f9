"""A run that something else has launched: its rank 0 keeps the run directory, which is then as good
as any other.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import until
from workbench.interop.export import export
from workbench.plan.schema import Plan
from workbench.runs import Reader, attach
from workbench.runs.launch.accelerate_command import launch_environment
from workbench.runs.launch.external_launcher import ExternalRun
from workbench.runs.launch.rendezvous_ports import free_port
from workbench.runs.run import Run
from workbench.runs.store.run_state import (
    Cause,
    first_state,
    stored_state,
    with_heartbeat,
    with_this_supervisor,
    write_state,
)
from workbench.runs.store.stop_request import request_stop


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    """An exported plan's folder, as ranks find it."""
    export(plan, tmp_path / "exported")
    for name in ("telemetry", "logs", "errors"):
        (tmp_path / "exported" / name).mkdir()
    return tmp_path / "exported"


@pytest.fixture
def begun(plan: Plan, folder: Path) -> Iterator[ExternalRun]:
    """What rank 0 keeps, from its start on."""
    (folder / "stop").write_bytes(b"")  # of a former launch
    kept = ExternalRun(folder, 0)
    kept.begin(plan.resolve())
    yield kept
    kept.end(0)


def test_rank_0_keeps_a_run_directory(begun: ExternalRun, folder: Path, plan: Plan) -> None:
    run = attach(folder)
    assert (run.state.phase, run.state.world_size, run.plan.world_size) == ("starting", 3, 3)
    begun.running()
    assert run.state.phase == "running" and "launched elsewhere" in repr(run)
    first = run.state.heartbeat
    until(lambda: run.state.heartbeat > first)
    begun.end(0)
    assert run.wait(1).phase == "finished"


def test_a_stop_is_told(begun: ExternalRun, folder: Path) -> None:
    begun.running()
    run = attach(folder)
    run.stop()
    until(lambda: run.state.phase == "stopping")
    with pytest.raises(
        TimeoutError, match="launched elsewhere, and only what launched it can end it"
    ):
        run.wait(0.1)
    begun.end(0)
    assert run.state.phase == "stopped"


def cause_of(run: Run) -> Cause:
    assert run.state.cause is not None
    return run.state.cause


def tell(
    folder: Path, rank: int, pid: int, host: str = platform.node(), node: int | None = None
) -> None:
    hello = {
        "kind": "hello",
        "t": 0.0,
        "rank": rank,
        "world_size": 3,
        "local_rank": rank,
        "pid": pid,
        "host": host,
        "node": node,
        "backend": "gloo",
        "device": "cpu",
        "epoch_offset": 0.0,
        "coordinates": {},
        "stage": 0,
        "versions": {},
    }
    (folder / "telemetry" / f"rank{rank:05d}.jsonl").write_text(json.dumps(hello) + "\n")


def test_a_failure_blames_the_rank_that_is_gone_not_its_survivors(
    begun: ExternalRun, folder: Path
) -> None:
    for rank, pid in enumerate((os.getpid(), 2**22 + 1, os.getpid())):
        tell(folder, rank, pid)
    error = {
        "rank": 0,
        "type": "RuntimeError",
        "message": "Connection closed by peer",
        "t_epoch": time.time(),
    }
    (folder / "errors" / "rank00000.json").write_text(
        json.dumps(error | {"step": 1, "action": None, "traceback": ""})
    )
    begun.end(1)
    state = attach(folder).state
    cause = cause_of(attach(folder))
    assert (state.phase, cause.rank) == (
        "failed",
        1,
    ) and "rank 1 stopped answering" in cause.message


def test_a_node_that_says_nothing_is_blamed_where_no_process_of_it_can_be_asked(
    begun: ExternalRun, folder: Path
) -> None:
    for rank, host in enumerate((platform.node(), "second", "third")):
        tell(folder, rank, os.getpid(), host, node=rank)
    for rank in (0, 1):
        error: dict[str, Any] = {"rank": rank, "step": 1, "action": None, "type": "RuntimeError"}
        error |= {"message": "Connection closed by peer", "t_epoch": time.time(), "traceback": ""}
        (folder / "errors" / f"rank{rank:05d}.json").write_text(json.dumps(error))
    begun.end(1)
    cause = cause_of(attach(folder))
    assert cause.rank == 2
    assert cause.message.startswith("rank 2 of node 2 (third) stopped answering")


def test_a_rank_0_that_is_gone_leaves_what_ranks_said(plan: Plan, folder: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from workbench.plan.schema import Plan
from workbench.runs.launch.external_launcher import ExternalRun
kept = ExternalRun(Path({str(folder)!r}), 0)
kept.begin(Plan.load({str(folder / "plan.yaml")!r}).resolve())
kept.running()
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert stored_state(folder).phase == "running"
    assert (
        cause_of(attach(folder)).message
        == f"rank 0 ({platform.node()}) of this run, which was launched elsewhere, is gone"
    )
    error = {
        "rank": 2,
        "step": 4,
        "action": None,
        "type": "ValueError",
        "message": "no",
        "traceback": "",
        "t_epoch": 1,
    }
    (folder / "errors" / "rank00002.json").write_text(json.dumps(error))
    assert cause_of(attach(folder)).message == "rank 2 raised ValueError: no in step 4"


def test_other_ranks_and_supervised_runs_are_left_alone(plan: Plan, folder: Path) -> None:
    ExternalRun(folder, 1).begin(plan.resolve())
    assert not (folder / "state.json").exists()
    write_state(folder, with_heartbeat(with_this_supervisor(first_state(3, 5))))
    request_stop(folder)
    ExternalRun(folder, 0).begin(plan.resolve())
    assert not stored_state(folder).launched_elsewhere and (folder / "stop").exists()


@pytest.mark.slow
@pytest.mark.slow
def test_a_torchrun_by_hand_is_attached_to_and_stopped(plan: Plan, tmp_path: Path) -> None:
    plan = plan.replace(
        **{"cluster.gpus": 2, "training.steps": 100000, "training.sequence_length": 32}
    )
    export(plan, tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += [
        "--master-port",
        str(free_port()),
        "-m",
        "workbench.engine.worker",
        str(tmp_path / "plan.yaml"),
    ]
    environ = {**os.environ, **launch_environment(plan.resolve())}
    launched = subprocess.Popen(
        torchrun, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: any(r["kind"] == "step" for r in Reader(tmp_path).poll()), seconds=90)
        run = attach(tmp_path)
        assert run.state.phase == "running" and run.state.launched_elsewhere
        run.stop()
        assert run.wait(60).phase == "stopped" and launched.wait(60) == 0
    finally:
        launched.send_signal(signal.SIGTERM)
        launched.wait(30)
    assert run.profile().loss
