"""A run directory that grows like a real one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.store.run_directory import FOLDERS
from workbench.runs.store.run_state import (
    Cause,
    State,
    first_state,
    with_heartbeat,
    with_this_supervisor,
    write_state,
)

from . import synthetic

MIB = 2**20


def make(folder: Path, world: int = 2, steps: int = 20) -> Path:
    """A run directory of a `tiny` pipeline that has not started."""
    changes = {"training.steps": steps, "training.global_batch": 8}
    plan = Plan.of("tiny", gpu="local", gpus=world, strategy="dapple", set=changes)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "plan.yaml").write_text(plan.resolve().to_yaml())
    put_state(folder, first_state(world, steps))
    return folder


def put_state(folder: Path, state: State, **changes: Any) -> State:
    """Write the state, supervised by this very process."""
    state = replace(with_heartbeat(with_this_supervisor(state)), **changes)
    write_state(folder, state)
    return state


def emit(folder: Path, rank: int, kind: str, /, **values: Any) -> None:
    """Append one record to a rank's telemetry."""
    line = {"kind": kind, "t": time.monotonic(), **values}
    with (folder / "telemetry" / f"rank{rank:05d}.jsonl").open("ab") as stream:
        stream.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def hello(folder: Path, world: int) -> None:
    """Every rank says hello and begins to train."""
    for rank in range(world):
        emit(
            folder,
            rank,
            "hello",
            rank=rank,
            world_size=world,
            local_rank=rank,
            pid=os.getpid(),
            host="here",
            backend="gloo",
            device="cpu",
            epoch_offset=0.0,
            coordinates={"data": 0, "pipeline": rank},
            stage=rank,
            versions={},
        )
        emit(folder, rank, "phase", phase="training", step=0)


def step(folder: Path, world: int, number: int, seconds: float = 0.1) -> None:
    """One step of every rank; the first two carry samples."""
    for rank in range(world):
        if number < 2:
            sample(folder, synthetic.profile("measured", world, scale=20 * MIB), rank, number)
        emit(
            folder,
            rank,
            "step",
            step=number,
            loss=synthetic.loss_at(number),
            seconds=seconds * (1 + 0.05 * rank),
            tokens=2048,
            gradient_norm=1.0,
            learning_rate=3e-4,
            loss_scale=None,
            skipped=False,
            bytes=(60 + 5 * rank + number % 3) * MIB,
            action="B",
        )


def sample(folder: Path, profile: Profile, rank: int, number: int) -> None:
    """What a rank writes on a sampled step."""
    for kind in ("memory", "timeline", "collectives"):
        frame = getattr(profile, kind)
        rows = (
            frame[frame["rank"] == rank]
            .drop(columns=["run", "source", "rank", "step"])
            .to_dict("records")
        )
        emit(folder, rank, kind, step=number, rows=rows)


def play(folder: Path, world: int, steps: int, seconds: float) -> None:
    """A whole run: starts, steps, obeys the stop file, ends."""
    state = put_state(folder, first_state(world, steps))
    hello(folder, world)
    state = put_state(folder, state, phase="running")
    for number in range(steps):
        step(folder, world, number, seconds)
        if number % 10 == 9:
            emit(folder, 0, "evaluation", step=number, loss=synthetic.loss_at(number) + 0.2)
        time.sleep(seconds)
        if (folder / "stop").exists():
            put_state(folder, state, phase="stopped", ended=time.time(), exit_code=0)
            return
    put_state(folder, state, phase="finished", ended=time.time(), exit_code=0)


def fail(folder: Path) -> None:
    """End the run by a failure of rank 1."""
    cause = Cause(
        1,
        "rank 1 was killed by SIGKILL in step 3",
        "Watch the machine's free memory.",
        "last line of rank 1",
    )
    put_state(
        folder, first_state(2, 20), phase="failed", ended=time.time(), exit_code=1, cause=cause
    )
