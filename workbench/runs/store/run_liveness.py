"""Whether a run lives: what its `state.json` says is believed only while its supervisor lives."""

from __future__ import annotations

import os
import platform
import signal
import time
from dataclasses import replace
from pathlib import Path

from workbench.runs.diagnose.first_cause import first_cause, read_errors
from workbench.runs.diagnose.rank_status import RankStatus
from workbench.runs.store.process_identity import (
    CLOCK_SECONDS,
    is_process,
    is_stopped,
    pid_space,
    start_ticks,
)
from workbench.runs.store.rank_logs import log_tail, tail_of
from workbench.runs.store.run_state import Cause, State, stored_state
from workbench.runs.store.telemetry_reader import history

SILENCE_SECONDS = 60.0
"""A heartbeat older than this means that the supervisor is gone, where its process cannot be asked.
"""
START_SECONDS = 20.0
"""A supervisor that has not spoken this long after it was started never will."""
STOPPED_SECONDS, LATE_SECONDS = 2.0, 10.0
"""A supervisor beats every second: after this long it is asked whether it was stopped, or it
is reported as silent.
"""


def read_state(folder: Path) -> State:
    """The state of the run in `folder`: as stored, unless it claims a supervisor that is gone."""
    state = stored_state(folder)
    if state.final:
        return state
    if has_live_supervisor(state):
        return replace(state, warning=supervisor_warning(state) or state.warning)
    state = stored_state(folder)  # it may have ended between the two looks
    if state.final:
        return state
    cause = failure_of_ranks(folder) if state.launched_elsewhere else None
    return replace(
        state, phase="failed", ended=state.heartbeat, cause=cause or _gone(folder, state)
    )


def failure_of_ranks(folder: Path) -> Cause | None:
    """Why a run without a supervisor failed: errors of ranks, and ranks that are gone without a
    `bye` record; None where all have ended well, or live.

    Processes of other hosts cannot be asked: where ranks complain of others, one there that has
    said nothing is taken to be gone since its last record.
    """
    ranks: dict[int, RankStatus] = {}
    here: dict[int, bool] = {}
    offset: dict[int, float] = {}
    last: dict[int, float] = {}
    for record in (record for records in history(folder).batches() for record in records):
        rank = record["rank"]
        ranks.setdefault(rank, RankStatus(rank)).take(record)
        last[rank] = record["t"]
        if record["kind"] == "hello":
            here[rank] = record["host"] == platform.node()
            offset[rank] = record["epoch_offset"]
    complained = {error["rank"] for error in read_errors(folder)}
    gone = {}
    for rank, seen in ranks.items():
        if seen.bye or rank not in here:
            continue
        if here[rank] and start_ticks(seen.pid or 0) is None:
            gone[rank] = replace(seen, gone=time.time())
        elif not here[rank] and complained and rank not in complained:
            gone[rank] = replace(seen, gone=last[rank] + offset[rank])
    if not gone and not complained:
        return None
    return first_cause(folder, gone, None, out_of_memory=False)


def _gone(folder: Path, state: State) -> Cause:
    advice = (
        "It was killed, or the machine was restarted. Start again, from the last checkpoint "
        "if there is one."
    )
    if state.launched_elsewhere:
        message = f"rank 0 ({state.host}) of this run, which was launched elsewhere, is gone"
        return Cause(0, message, advice, log_tail(folder, 0))
    return Cause(
        None,
        "the supervisor of this run is gone",
        advice,
        tail_of(folder / "logs" / "supervisor.log"),
    )


def has_live_supervisor(state: State) -> bool:
    """Whether the supervisor lives: asked of its process where its number holds, judged by its
    heartbeat elsewhere.
    """
    if not _askable(state):
        return _silence(state) < SILENCE_SECONDS
    if state.supervisor_pid is None:
        return _silence(state) < START_SECONDS
    if state.supervisor_ticks is not None:
        return start_ticks(state.supervisor_pid) == state.supervisor_ticks
    return _silence(state) < CLOCK_SECONDS or is_process(
        state.supervisor_pid, state.supervisor_created
    )


def supervisor_warning(state: State) -> str:
    """What holds a supervisor that lives and does not beat, in words; empty where it does."""
    silence, pid = _silence(state), state.supervisor_pid
    if pid is None or silence < STOPPED_SECONDS:
        return ""
    who = "rank 0" if state.launched_elsewhere else "the supervisor"
    if _askable(state) and is_stopped(pid) and state.launched_elsewhere:
        return (
            f"rank 0 is frozen: its process is stopped (SIGSTOP); `kill -CONT {pid}` lets it go on"
        )
    if _askable(state) and is_stopped(pid):
        return (
            "the supervisor is stopped (SIGSTOP): ranks train on and nobody watches them; "
            f"`kill -CONT {pid}` lets it go on, `workbench stop` too"
        )
    if silence < LATE_SECONDS:
        return ""
    return (
        f"{who} (process {pid} of {state.host}) has not written for {silence:.0f} s: is the "
        f"disk full?"
    )


def continue_supervisor(state: State) -> None:
    """Let a supervisor go on that somebody has stopped, so that it heeds what is asked of it."""
    if (
        _askable(state)
        and has_live_supervisor(state)
        and state.supervisor_pid is not None
        and is_stopped(state.supervisor_pid)
    ):
        os.kill(state.supervisor_pid, signal.SIGCONT)


def _askable(state: State) -> bool:
    """Whether process numbers of the run mean the same here."""
    return state.pid_space == pid_space() if state.pid_space else state.host == platform.node()


def _silence(state: State) -> float:
    """Seconds since the last heartbeat; of a run on this boot, whatever was done to the clock
    meanwhile.
    """
    if state.heartbeat_monotonic is not None and state.pid_space and state.pid_space == pid_space():
        return time.monotonic() - state.heartbeat_monotonic
    return time.time() - state.heartbeat
