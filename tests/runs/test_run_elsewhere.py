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
from workbench.errors import PlanError
from workbench.interop.export import export
from workbench.plan.schema import Plan
from workbench.runs import Reader, attach
from workbench.runs.launch.accelerate_command import launch_environment
from workbench.runs.launch.earlier_launch import set_aside_records
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


def launched_again(folder: Path) -> tuple[int, str]:
    """launch.sh in `folder`: (exit code, what it says)."""
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": own, "PYTHONPATH": str(Path(__file__).parents[2])}
    environ |= {"PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "launch.sh"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def steps_of(path: Path) -> list[int]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "step"]


@pytest.mark.slow
def test_an_exported_plan_that_is_launched_again_goes_on(plan: Plan, tmp_path: Path) -> None:
    changes = {"cluster.gpus": 1, "training.steps": 4, "training.sequence_length": 32}
    plan = plan.replace(**changes, **{"checkpoint.every": 2, "checkpoint.keep": 1})
    export(plan, tmp_path)
    telemetry, checkpoints = tmp_path / "telemetry", tmp_path / "checkpoints"
    assert launched_again(tmp_path)[0] == 0
    first = telemetry / "rank00000.jsonl"
    assert steps_of(first) == [0, 1, 2, 3]
    code, said = launched_again(tmp_path)
    assert code and "training.steps: is 4, and step-00000004 of an earlier launch" in said
    assert steps_of(first) == [0, 1, 2, 3] and (checkpoints / "step-00000004").exists()
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("steps: 4\n", "steps: 6\n"))
    code, said = launched_again(tmp_path)
    assert code == 0, said
    assert steps_of(first) == [4, 5] and (checkpoints / "step-00000006").exists()
    assert steps_of(telemetry / "before-1-rank00000.jsonl") == [0, 1, 2, 3]
    with pytest.raises(PlanError, match=r"--to: .* holds records or checkpoints of another plan"):
        export(plan.replace(**{"training.steps": 9}), tmp_path)


def test_records_of_every_earlier_launch_stay(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    own = tmp_path / "telemetry" / "rank00003.jsonl"
    for launch in ("first", "second"):
        own.write_text(launch)
        set_aside_records(tmp_path, 3)
    found = {path.name: path.read_text() for path in own.parent.iterdir()}
    assert found == {"before-1-rank00003.jsonl": "first", "before-2-rank00003.jsonl": "second"}


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
