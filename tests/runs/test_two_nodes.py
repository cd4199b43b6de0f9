"""An exported job on two nodes of this machine: job.sbatch, launch.sh and accelerate launch as on a
cluster; Slurm's commands are stand-ins, and the nodes meet on the loopback address.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import stub_slurm
from tests.runs.conftest import until
from workbench.interop.export import export
from workbench.plan.schema import Plan
from workbench.runs import Reader, attach
from workbench.runs.launch.rendezvous_ports import free_port

pytestmark = pytest.mark.slow
END_SECONDS = 60.0
"""A deadline of survivors: their collectives', 30 s, and that of ending."""


class Job:
    """A job that `sbatch` would have started; `folder` is the exported plan's."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        port = {"MAIN_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sbatch")],
            env={**environment, **port, "SLURM_SUBMIT_DIR": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def pid(self, node: int) -> int:
        return int((self.folder / f"node{node}.pid").read_text())

    def out(self, node: int) -> str:
        return (self.folder / f"node{node}.out").read_text(errors="replace")

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in Reader(self.folder).poll() if record["kind"] == kind]

    def kill(self, node: int) -> None:
        """The power of a node fails: nothing of it gets to say a word."""
        root = psutil.Process(self.pid(node))
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        for node in range(len(stub_slurm.HOSTS)):
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                if psutil.Process(self.pid(node)).is_running():
                    os.killpg(self.pid(node), signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []
    environment = stub_slurm.install(tmp_path / "slurm")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("to be or not to be " * 200)

    def start(gpus: int, steps: int, timeout: int = 30, own_disk: bool = False) -> Job:
        changes = {
            "cluster.nodes": 2,
            "corpus.source": str(corpus),
            "training.sequence_length": 32,
            "training.steps": steps,
            "telemetry.timeout_seconds": timeout,
        }
        export(
            Plan.of("tiny", gpu="local", gpus=gpus, strategy="ddp", set=changes), tmp_path / "job"
        )
        if own_disk:
            shutil.copytree(tmp_path / "job", tmp_path / "disk")
        own = {stub_slurm.OWN_DISK: str(tmp_path / "disk")} if own_disk else {}
        jobs.append(Job(tmp_path / "job", {**environment, **own}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def test_two_nodes_train_one_plan(submit: Callable[..., Job]) -> None:
    job = submit(gpus=4, steps=4)
    assert job.process.wait(90) == 0, job.out(0) + job.out(1)
    run = attach(job.folder)
    assert run.state.phase == "finished"
    for node in range(2):
        assert f"node {node} of 2 (from 0): waits 600 s for the others" in job.out(node)
    places = {r["rank"]: (r["host"], r["node"], r["local_rank"]) for r in job.records("hello")}
    first, second = stub_slurm.HOSTS
    assert places == {0: (first, 0, 0), 1: (first, 0, 1), 2: (second, 1, 0), 3: (second, 1, 1)}
    losses: dict[int, set[float]] = {step: set() for step in range(4)}
    for record in job.records("step"):
        losses[record["step"]].add(record["loss"])
    assert all(len(seen) == 1 for seen in losses.values())  # one model, not one a node


@pytest.mark.parametrize("dead", [0, 1])
def test_the_survivors_of_a_dead_node_end_and_name_it(
    submit: Callable[..., Job], dead: int
) -> None:
    job = submit(gpus=2, steps=100000)
    until(lambda: {r["rank"] for r in job.records("step")} == {0, 1}, seconds=60)
    job.kill(dead)
    assert job.process.wait(END_SECONDS) != 0
    cause = attach(job.folder).state.cause
    assert cause is not None and cause.rank == dead
    assert cause.message.startswith(f"rank {dead}") and stub_slurm.HOSTS[dead] in cause.message


def test_a_node_with_a_disk_of_its_own_is_named_before_training(submit: Callable[..., Job]) -> None:
    job = submit(gpus=2, steps=4, timeout=10, own_disk=True)
    assert job.process.wait(90) != 0
    told = f"cluster.nodes: is 2, but node 1 ({stub_slurm.HOSTS[1]}:"
    for node in range(2):
        assert f"error: {told}" in job.out(node) and "Traceback" not in job.out(node).split(told)[0]
    assert not job.records("step")
    cause = attach(job.folder).state.cause
    assert cause is not None and told in cause.message
