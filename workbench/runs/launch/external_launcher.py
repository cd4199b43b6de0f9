"""A run that no supervisor of ours has launched: rank 0 keeps its run directory, so that it can be
attached to.

An exported plan runs under `accelerate launch`, torchrun or Slurm, which end its ranks by their own
rules; what a supervisor would write (`command.json`, `state.json` with phase and heartbeat) the
first rank writes. Of the rest there is no `frames/`, which no rank waits for, and nobody ends ranks
that heed no `stop`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.checkpoint.resume_changes import resume_notes
from workbench.interop.launch_environment import set_for_ranks
from workbench.runs.store.command_file import RunCommand, write_command
from workbench.runs.store.run_liveness import failure_of_ranks, has_live_supervisor
from workbench.runs.store.run_lock import lock_rank, lock_run
from workbench.runs.store.run_state import (
    Cause,
    Phase,
    first_state,
    stored_state,
    with_heartbeat,
    with_this_supervisor,
)
from workbench.runs.store.stop_request import read_stop
from workbench.runs.store.supervisor_files import SupervisorFiles

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan

HEARTBEAT_SECONDS = 1.0
WORDS_SECONDS = 5.0
"""How long ranks of other nodes may take to say why they failed, once rank 0 has failed."""


class ExternalRun:
    """The state of the run in `folder`, from its rank 0; on other ranks, and where a supervisor
    keeps it, only the lock of this rank.

    Raises:
        PlanError: Another launch in the same folder lives.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._owns_state = rank == 0 and not _is_supervised(folder)
        self._locks = [lock_rank(folder, rank), *([lock_run(folder)] if self._owns_state else [])]
        self._lock, self._ended = threading.Lock(), threading.Event()

    def begin(self, plan: ResolvedPlan, skipped: Sequence[str] = ()) -> None:
        """Make `folder` the run directory of a complete `plan` that starts now; asks of a former
        launch are void. `skipped` says which checkpoints are damaged.
        """
        if not self._owns_state:
            return
        notes = [*skipped, *resume_notes(plan)]
        for note in notes:
            print(note, file=sys.stderr, flush=True)
        self._nodes = plan.cluster.nodes or 1
        (self.folder / "stop").unlink(missing_ok=True)
        write_command(self.folder, _command(plan))
        self._files = SupervisorFiles(self.folder)
        self._state = replace(
            first_state(plan.world_size, plan.training.steps, notes), launched_elsewhere=True
        )
        self._state = with_this_supervisor(self._state)
        self._update()
        threading.Thread(target=self._heartbeats, name="heartbeat", daemon=True).start()

    def running(self) -> None:
        """Every rank has joined."""
        if self._owns_state:
            self._update(phase="running")

    def end(self, code: int) -> None:
        """How it went: `code` is 0, or 1 where a rank has failed, whose words then lie in
        `errors/`.
        """
        if not self._owns_state or not hasattr(self, "_files"):
            return
        if code:
            self._await_words()
        self._ended.set()
        phase: Phase = "failed" if code else "stopped" if read_stop(self.folder) else "finished"
        cause = failure_of_ranks(self.folder) or Cause(None, "rank 0 failed") if code else None
        with self._lock:
            ended = with_heartbeat(replace(self._state, phase=phase, exit_code=code, cause=cause))
            self._files.last_state(replace(ended, ended=ended.heartbeat))
        self._locks.clear()

    def _await_words(self) -> None:
        """Let ranks of other nodes say what they saw, before one that says nothing is blamed: their
        processes cannot be asked.
        """
        until = time.monotonic() + (WORDS_SECONDS if self._nodes > 1 else 0.0)
        errors = self.folder / "errors"
        while time.monotonic() < until:
            if len([*errors.glob("rank*.json")]) >= self._state.world_size:
                return
            time.sleep(0.2)

    def _heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            stopping = self._state.phase == "running" and read_stop(self.folder) is not None
            self._update(**({"phase": "stopping"} if stopping else {}))

    def _update(self, **changes: Any) -> None:
        with (
            self._lock,
            suppress(OSError),
        ):  # a run directory that is gone is no reason to end a training run
            if not self._ended.is_set():
                self._state = with_heartbeat(replace(self._state, **changes))
                self._files.state(self._state)


def _is_supervised(folder: Path) -> bool:
    try:
        state = stored_state(folder)
    except ValueError:
        return False
    return not state.final and not state.launched_elsewhere and has_live_supervisor(state)


def _command(plan: ResolvedPlan) -> RunCommand:
    """This process's own command and environment: what launched it is not known."""
    timeout = float(plan.telemetry.timeout_seconds)
    env, steps = set_for_ranks(plan, os.environ), plan.training.steps
    return RunCommand(sys.orig_argv, env, [], os.getcwd(), plan.world_size, steps, timeout, timeout)
