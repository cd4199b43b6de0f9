"""A plan of three ranks, runs of it through the stub worker, and proof that each leaves no process
behind.
"""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from workbench.plan.schema import Plan
from workbench.runs.launch.accelerate_command import Recipe
from workbench.runs.launch.checked_launch import start

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def plan(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("to be or not to be " * 100)
    changes = {"training.steps": 5, "corpus.source": str(text)}
    return Plan.of("tiny", gpu="local", gpus=3, strategy="ddp", set=changes)


@pytest.fixture
def go(plan, tmp_path, monkeypatch):
    """`go(fault, steps, world)` starts a run of stub workers; afterwards nothing of it may be
    alive.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    runs = []

    def launch(
        fault="none",
        steps=5,
        hello_seconds=20.0,
        progress_seconds=20.0,
        module="tests.runs.stub_worker",
        root=None,
        world=plan.world_size,
    ):
        launcher = (sys.executable, "-m", "tests.runs.light_launcher", str(world), fault)
        recipe = Recipe(module, launcher, hello_seconds, progress_seconds)
        changes = {"training.steps": steps, "cluster.gpus": world}
        run = start(
            plan.replace(**changes),
            root=root or tmp_path / "runs",
            force=root is not None,
            _recipe=recipe,
        )
        runs.append(run)
        return run

    yield launch
    deadline = time.monotonic() + 5  # a supervisor ends a moment after it wrote the last state
    while any(processes_of(run) for run in runs) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [process for run in runs for process in processes_of(run)]
    for process in left:
        process.kill()
    assert not left


def processes_of(run):
    """Every live process of a run: each has the run directory on its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                str(run.dir) in " ".join(process.cmdline())
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(condition, seconds=20.0):
    """Wait until `condition()` is true and give it back; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value
