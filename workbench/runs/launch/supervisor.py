"""The process that owns a run: starts the launcher, watches it, ends it, and says in `state.json`
how it went.

`python -m workbench.runs.launch.supervisor RUN`. It is detached from whoever started the run and
outlives them; whatever it starts does not outlive it (see `parent_death`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import PlanError
from workbench.runs.diagnose.failure_advice import advise
from workbench.runs.diagnose.first_cause import first_cause
from workbench.runs.launch.parent_death import adopt_orphans, python_module
from workbench.runs.launch.process_tree import (
    TERM_SECONDS,
    end_descendants,
    exit_code,
    oom_kills,
    reap,
    wake_descendants,
)
from workbench.runs.launch.rank_watch import RankWatch
from workbench.runs.store.command_file import read_command
from workbench.runs.store.process_identity import is_stopped
from workbench.runs.store.run_lock import lock_run
from workbench.runs.store.run_state import (
    Cause,
    Phase,
    State,
    stored_state,
    with_heartbeat,
    with_this_supervisor,
)
from workbench.runs.store.stop_request import Stop, read_stop, request_stop
from workbench.runs.store.supervisor_files import SupervisorFiles, keep_frames, log_message

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0


class Supervisor:
    """One run from launch to its last state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = read_command(folder)
        self.files = SupervisorFiles(folder)
        self.state: State = stored_state(folder)
        self.watch = RankWatch(folder, self.command)
        self.oom_kills = oom_kills()
        self.signalled = False
        """Whether this process was asked to end, which it takes as a request to stop the run."""
        self.stop_at: float | None = None
        """When the grace after a request to stop is over, monotonic seconds."""
        self.terminated = False
        self.lingered = False
        """Whether the launcher had to be ended although its ranks were through."""

    def run(self) -> None:
        """Launch, watch until the end, leave nothing behind."""
        cause = None
        launcher = None
        try:
            launcher = self._launch()
            cause = self._watch(launcher)
        except Exception as error:
            message = f"the supervisor failed: {type(error).__name__}: {error}"
            cause = Cause(None, message, log_tail=traceback.format_exc())
        try:
            end_descendants(0.0 if cause or self.lingered else TERM_SECONDS)
        except TimeoutError as error:
            self.files.event("survivors", message=str(error))
        self._finish(None if self.lingered else exit_code(launcher), cause)

    def on_signal(self) -> None:
        """Take a signal as a request to stop the run; a full disk must not lose it."""
        self.signalled = True
        with suppress(OSError):
            request_stop(self.folder)

    def _launch(self) -> subprocess.Popen[bytes]:
        self.state = with_this_supervisor(self.state)
        self._update()
        for note in self.state.notes:
            self.files.event("note", message=note)
        env = {
            key: value for key, value in os.environ.items() if key not in self.command.unset
        } | self.command.env
        shim = [
            *python_module("workbench.runs.launch.parent_death"),
            str(os.getpid()),
            *self.command.argv,
        ]
        with (self.folder / "logs" / "launcher.log").open("ab") as log:
            launcher = subprocess.Popen(
                shim,
                cwd=self.command.cwd,
                env=env,
                start_new_session=True,  # its own process group, so that SIGTERM reaches all of it
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.files.event("launched", pid=launcher.pid)
        self._update(launcher_pid=launcher.pid)
        return launcher

    def _watch(self, launcher: subprocess.Popen[bytes]) -> Cause | None:
        """Follow the ranks until the launcher ends; a cause where it had to be ended because of a
        rank.
        """
        last = time.monotonic()
        while launcher.poll() is None:
            time.sleep(POLL_SECONDS)
            self._poll()
            self.lingered = self.watch.lingering
            if self.lingered or self._stopping(launcher):
                return None
            # What ranks write is lost where the disk is full: their silence says nothing then.
            if self.files.refused is None and (cause := self.watch.verdict()):
                return cause
            if time.monotonic() - last >= HEARTBEAT_SECONDS or self._warned(launcher):
                last = time.monotonic()
                reap(launcher.pid)
                self._update()
        self._poll()
        return None

    def _warned(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Whether there is something new to warn of, or no more."""
        words = [self.watch.warning(), self._stopped_launcher(launcher)]
        warning = "; ".join(word for word in words if word)
        if warning == self.state.warning:
            return False
        if warning:
            self.files.event("warning", message=warning)
        self.state = replace(self.state, warning=warning)
        return True

    def _stopped_launcher(self, launcher: subprocess.Popen[bytes]) -> str:
        """Whether somebody has stopped the launcher, in words."""
        if not is_stopped(launcher.pid):
            return ""
        return (
            "the launcher is stopped (SIGSTOP): ranks train on, and it does not see them end; "
            f"`kill -CONT {launcher.pid}` lets it go on"
        )

    def _poll(self) -> None:
        for seen in self.watch.poll():
            self.files.event("hello", rank=seen.rank, pid=seen.pid)
            if self.watch.all_here and self.state.phase == "starting":
                self._update(phase="running")

    def _stopping(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Heed a request to stop: wait for the ranks, then SIGTERM; True when waiting is over."""
        stop = read_stop(self.folder) or (Stop() if self.signalled else None)
        now = time.monotonic()
        if stop is None:
            return False
        if self.stop_at is None:
            self.stop_at = now + stop.grace_seconds
            self.files.event("stopping", grace_seconds=stop.grace_seconds)
            self._update(phase="stopping")
            wake_descendants()
        elif not self.terminated and now >= self.stop_at:
            self.terminated = True
            self.files.event("terminated", pid=launcher.pid)
            os.killpg(launcher.pid, signal.SIGTERM)
        return now >= self.stop_at + TERM_SECONDS

    def _finish(self, exit_code: int | None, cause: Cause | None) -> None:
        if cause is None and self.stop_at is not None and (self.terminated or exit_code == 0):
            phase: Phase = "stopped"
        elif cause is None and self.watch.all_done and (exit_code == 0 or self.lingered):
            phase = (
                "finished"  # a launcher, or a rank, that hangs after its last word has cost nothing
            )
        elif cause is None and self.files.lost and exit_code == 0:
            phase = (
                "finished"  # every rank has ended well, and its last words were lost on a full disk
            )
        else:
            phase = "failed"
            out_of_memory = oom_kills() > self.oom_kills
            cause = cause or first_cause(
                self.folder, self.watch.ranks, exit_code, out_of_memory=out_of_memory
            )
            cause = self._with_disk_error(cause)
        keep_frames(self.folder)
        self.files.event(phase, exit_code=exit_code)
        lost = "the disk was full for a while: records are missing" if self.files.lost else ""
        warning = "; ".join(word for word in (lost, *self.watch.lasting_warnings) if word)
        self.state = replace(
            self.state,
            phase=phase,
            exit_code=exit_code,
            cause=cause,
            ended=time.time(),
            warning=warning,
        )
        self.files.last_state(with_heartbeat(self.state))

    def _with_disk_error(self, cause: Cause) -> Cause:
        """The cause, led by the disk where that refused the last write: what ranks had to say was
        lost there.
        """
        if (refused := self.files.refused) is None or (refused.strerror or "") in cause.message:
            return cause
        message = (
            f"the disk of {self.folder} refuses writes ({refused.strerror or refused}); "
            f"last seen: {cause.message}"
        )
        return replace(cause, message=message, advice=advise(self.folder, message) or cause.advice)

    def _update(self, **changes: Any) -> None:
        """Change the state and beat."""
        self.state = with_heartbeat(replace(self.state, **changes))
        self.files.state(self.state)


def main() -> None:
    """Supervise the run named on the command line."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        lock = lock_run(folder)
    except PlanError as error:
        sys.exit(_refused(error))
    supervisor = Supervisor(folder)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.on_signal())
    adopt_orphans()
    supervisor.run()
    del lock  # held until here


def _refused(error: PlanError) -> int:
    log_message(f"error: {error}")
    return 2


if __name__ == "__main__":
    main()
