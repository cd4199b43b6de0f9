"""What a run is doing now: `state.json`, replaced atomically by the supervisor, believed only while it lives."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import orjson
import psutil

from workbench.runs.logs import tail_of

Phase = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]
FINAL = ("finished", "failed", "stopped")
"""Phases that a run never leaves."""

SILENCE_SECONDS = 60.0
"""A heartbeat older than this means that the supervisor is gone, where its process cannot be asked."""
START_SECONDS = 20.0
"""A supervisor that has not spoken this long after it was started never will."""
CLOCK_SECONDS = 3.0
"""How far two readings of one process's start may differ when the clock is set in between."""


@dataclass(frozen=True)
class Cause:
    """Why a run failed: the first cause, not what followed from it."""

    rank: int | None
    message: str
    advice: str = ""
    log_tail: str = ""


@dataclass(frozen=True)
class State:
    """The content of `state.json`; times are seconds since the epoch."""

    phase: Phase
    world_size: int
    steps: int
    heartbeat: float
    host: str = ""
    supervisor_pid: int | None = None
    supervisor_created: float | None = None
    launcher_pid: int | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cause: Cause | None = None

    @property
    def final(self) -> bool:
        """Whether the run is over."""
        return self.phase in FINAL


def created(pid: int) -> float | None:
    """When process `pid` started, epoch seconds; None where there is no such process, or only its remains."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def is_process(pid: int | None, started: float | None) -> bool:
    """Whether `pid` is alive and still the process that started then, not a later one with the same number."""
    if pid is None or started is None:
        return False
    now = created(pid)
    return now is not None and abs(now - started) <= CLOCK_SECONDS


def first_state(world_size: int, steps: int) -> State:
    """The state of a run whose supervisor has not spoken yet."""
    return State("starting", world_size, steps, heartbeat=time.time(), host=platform.node(), started=time.time())


def write_state(folder: Path, state: State) -> None:
    """Replace `folder/state.json`; a reader sees the old content or the new, never a part."""
    temporary = folder / f".state.{os.getpid()}"
    temporary.write_bytes(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
    os.replace(temporary, folder / "state.json")


def stored_state(folder: Path) -> State:
    """What `folder/state.json` says. Raises `ValueError` where `folder` is no run directory."""
    try:
        content: dict[str, Any] = orjson.loads((folder / "state.json").read_bytes())
        known = {field.name for field in fields(State)}
        content = {key: value for key, value in content.items() if key in known}
        cause = content.pop("cause", None)
        return _checked(State(**content, cause=Cause(**cause) if cause else None))
    except (OSError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not a run directory: {getattr(error, 'strerror', None) or error}") from error


def _checked(state: State) -> State:
    """`state`, if a supervisor can have written it; raises `TypeError` for a file that something else has changed."""
    counts, times = (state.world_size, state.steps), (state.heartbeat, state.started, state.ended)
    if state.phase not in get_args(Phase) or not all(isinstance(count, int) for count in counts):
        raise TypeError("state.json is damaged")
    if state.heartbeat is None or not all(time is None or isinstance(time, int | float) for time in times):
        raise TypeError("state.json is damaged")
    return state


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run directory."""
    try:
        stored_state(folder)
    except ValueError:
        return False
    return True


def read_state(folder: Path) -> State:
    """The state of the run in `folder`: as stored, unless it claims a supervisor that is gone."""
    state = stored_state(folder)
    if state.final or supervised(state):
        return state
    state = stored_state(folder)  # it may have ended between the two looks
    if state.final:
        return state
    advice = "It was killed, or the machine was restarted. Start again, from the last checkpoint if there is one."
    cause = Cause(None, "the supervisor of this run is gone", advice, tail_of(folder / "logs" / "supervisor.log"))
    return replace(state, phase="failed", ended=state.heartbeat, cause=cause)


def supervised(state: State) -> bool:
    """Whether the supervisor lives: asked of its process on this host, judged by its heartbeat on another."""
    silence = time.time() - state.heartbeat
    if state.host != platform.node():
        return silence < SILENCE_SECONDS
    if state.supervisor_pid is None:
        return silence < START_SECONDS
    return is_process(state.supervisor_pid, state.supervisor_created)
