"""What a run is doing: `state.json`, replaced atomically by the supervisor."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import orjson
import psutil

from workbench.runs.store.process_identity import pid_space, start_ticks
from workbench.safe_io.files import known_file, unread
from workbench.safe_io.json_field_checks import has, list_of, number, one_of, or_null, text, whole

Phase = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]
FINAL = ("finished", "failed", "stopped")
"""Phases that a run never leaves."""


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
    supervisor_ticks: int | None = None
    """When the supervisor started, clock ticks since boot."""
    pid_space: str = ""
    """Where its process numbers and its monotonic clock hold (`identity.pid_space`)."""
    heartbeat_monotonic: float | None = None
    """The heartbeat by the monotonic clock, which nobody sets."""
    launched_elsewhere: bool = False
    """Whether no supervisor of ours has launched it: then rank 0 keeps this file, and is meant by
    the supervisor.
    """
    launcher_pid: int | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cause: Cause | None = None
    warning: str = ""
    """What stands against the run now, though it may yet go on."""
    notes: list[str] = field(default_factory=list)
    """Notes on what the run goes on from that its plan does not say."""

    @property
    def final(self) -> bool:
        """Whether the run is over."""
        return self.phase in FINAL


def _pid(value: Any) -> bool:
    return whole(value) and value < 2**31


def _time(value: Any) -> bool:
    """Seconds since the epoch, or since boot, that a calendar can tell."""
    return number(value) and 0 <= value < 1e11


_FIELDS = {
    "phase": one_of(*get_args(Phase)),
    "world_size": whole,
    "steps": whole,
    "heartbeat": _time,
    "host": text,
    "supervisor_pid": or_null(_pid),
    "supervisor_created": or_null(_time),
    "supervisor_ticks": or_null(whole),
    "pid_space": text,
    "heartbeat_monotonic": or_null(_time),
    "launcher_pid": or_null(_pid),
    "started": or_null(_time),
    "ended": or_null(_time),
    "exit_code": or_null(number),
    "warning": text,
    "notes": list_of(text),
}
_CAUSE = {"rank": or_null(whole), "message": text, "advice": text, "log_tail": text}


def first_state(world_size: int, steps: int, notes: Sequence[str] = ()) -> State:
    """The state of a run whose supervisor has not spoken yet."""
    state = State("starting", world_size, steps, heartbeat=0.0, host=platform.node())
    state = replace(state, started=time.time(), pid_space=pid_space(), notes=[*notes])
    return with_heartbeat(state)


def with_heartbeat(state: State) -> State:
    """The state with a heartbeat of now."""
    return replace(state, heartbeat=time.time(), heartbeat_monotonic=time.monotonic())


def with_this_supervisor(state: State) -> State:
    """The state with this very process as its supervisor."""
    me = psutil.Process()
    return replace(
        state,
        host=platform.node(),
        supervisor_pid=me.pid,
        supervisor_created=me.create_time(),
        supervisor_ticks=start_ticks(me.pid),
        pid_space=pid_space(),
    )


def write_state(folder: Path, state: State) -> None:
    """Replace `folder/state.json`; a reader sees the old content or the new, never a part."""
    # Written beside it and renamed: rename(2) replaces atomically within one file system.
    temporary = folder / f".state.{os.getpid()}"
    try:
        temporary.write_bytes(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
        os.replace(temporary, folder / "state.json")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def stored_state(folder: Path) -> State:
    """What `folder/state.json` says. Raises `ValueError` where `folder` is no run directory."""
    try:
        known_file(folder / "state.json")
        content: dict[str, Any] = orjson.loads((folder / "state.json").read_bytes())
        known = {field.name for field in fields(State)}
        content = {key: value for key, value in content.items() if key in known}
        cause = content.pop("cause", None)
        return _checked(State(**content, cause=Cause(**cause) if cause else None))
    except OSError as error:
        raise ValueError(f"{folder} is not a run directory: {unread(error)}") from error
    except (TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not a run directory: state.json is damaged") from error


def _checked(state: State) -> State:
    """`state`, if a supervisor can have written it; raises `TypeError` for a file that something
    else has changed.
    """
    if not has(vars(state), _FIELDS) or (
        state.cause is not None and not has(vars(state.cause), _CAUSE)
    ):
        raise TypeError
    return state


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run directory."""
    try:
        stored_state(folder)
    except ValueError:
        return False
    return True
