"""A plan of three ranks, runs of it through the stub worker, and proof that each leaves no process
behind.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.plan.schema import Plan
from workbench.runs.launch.accelerate_command import Recipe
from workbench.runs.launch.checked_launch import start
from workbench.runs.run import Run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    text = tmp_path / "corpus.txt"
    text.write_text("to be or not to be " * 100)
    changes = {"training.steps": 5, "corpus.source": str(text)}
    return Plan.of("tiny", gpu="local", gpus=3, strategy="ddp", set=changes)


@pytest.fixture
def go(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`go(fault, steps, world)` starts a run of stub workers; afterwards nothing of it may be
    alive.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    runs = []

    def launch(
        fault: str = "none",
        steps: int = 5,
        hello_seconds: float = 20.0,
        progress_seconds: float = 20.0,
        module: str = "tests.runs.stub_worker",
        root: Path | None = None,
        world: int = plan.world_size,
    ) -> Run:
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


def processes_of(run: Run) -> list[Any]:
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


def until(condition: Callable[..., Any], seconds: float = 20.0) -> Any:
    """Wait until `condition()` is true and give it back; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value
