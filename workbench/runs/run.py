"""A run, seen from outside: everything is read from its directory, so any process can hold one, now
or next week.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.checkpoint.checkpoint_lock import clear
from workbench.checkpoint.checksums import Told, refuse_damaged
from workbench.checkpoint.resume_point import checkpoint_of, finished
from workbench.errors import PlanError
from workbench.interop import export
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.launch.accelerate_command import Recipe, compose
from workbench.runs.launch.parent_death import python_module
from workbench.runs.launch.preflight import preflight
from workbench.runs.launch.rendezvous_ports import checked_port
from workbench.runs.store.command_file import write_command
from workbench.runs.store.rank_logs import last_lines
from workbench.runs.store.run_directory import create, default_root
from workbench.runs.store.run_liveness import read_state, wake
from workbench.runs.store.run_state import State, first_state, is_run, write_state
from workbench.runs.store.stop_request import GRACE_SECONDS, Stop, request_stop
from workbench.runs.store.telemetry_frames import Measured, keep
from workbench.runs.store.telemetry_reader import Reader, history
from workbench.safe_io import yaml_files
from workbench.untrusted_text import escaped

POLL_SECONDS = 0.1
CALIBRATION = "calibration.yaml"
"""A run's own copy of the calibration that its plan names."""


class Run:
    """The run in a directory; a view that owns nothing."""

    def __init__(self, folder: str | Path) -> None:
        self.dir = Path(folder).absolute()
        read_state(self.dir)

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.dir.name

    @property
    def state(self) -> State:
        """What it is doing now."""
        return read_state(self.dir)

    @cached_property
    def plan(self) -> ResolvedPlan:
        """The plan that runs, resolved."""
        return Plan.load(self.dir / "plan.yaml").resolve()

    def measured(self) -> Measured:
        """An empty collection for this run's records; feed it from a `Reader` to follow the run."""
        return measured(self.id, self.plan)

    def profile(self) -> Profile:
        """What has been measured so far."""
        return profile_of(self.dir)

    def wait(
        self,
        timeout: float | None = None,
        progress: Callable[[list[dict[str, Any]]], None] | None = None,
        seen: Callable[[State], None] | None = None,
    ) -> State:
        """Wait until the run is over; its last state.

        `progress` is called with new telemetry records as they come, `seen` with the state at every
        look. `timeout` is in seconds; None waits as long as the run's supervisor lives. Raises
        `TimeoutError`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        reader = Reader(self.dir)
        while True:
            state = self.state
            if seen:
                seen(state)
            if progress:
                for records in _new(reader, state.final):
                    progress(records)
            if state.final:
                return state
            if deadline is not None and time.monotonic() > deadline:
                why = f": {state.warning}" if state.warning else ""
                why += (
                    "; it was launched elsewhere, and only what launched it can end it"
                    * state.launched_elsewhere
                )
                raise TimeoutError(f"run {self.id} is still {state.phase} after {timeout:g} s{why}")
            time.sleep(POLL_SECONDS)

    def stop(self, *, checkpoint: bool = False, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ask the run to stop after its step, and return at once; a run that is over is left alone.

        `checkpoint` asks it to save one first. Ranks that do not end within `grace_seconds` are
        ended, but not those of a run that was launched elsewhere.
        """
        if not (state := self.state).final:
            request_stop(self.dir, Stop(checkpoint, grace_seconds))
            wake(state)

    def log(self, rank: int, lines: int = 20) -> str:
        """The last lines that `rank` printed."""
        return last_lines(self.dir, rank, lines)

    def __repr__(self) -> str:
        return f"<Run {self.id}: {_words(self.state)}>"

    def _repr_html_(self) -> str:
        state = self.state
        tail = state.cause.log_tail if state.cause else ""
        log = f"<pre>{escaped(tail)}</pre>" if tail else ""
        words, folder = escaped(_words(state)), escaped(str(self.dir))
        return f"<div><b>{escaped(self.id)}</b> {words}<br>{folder}{log}</div>"


def _new(reader: Reader, final: bool) -> Iterable[list[dict[str, Any]]]:
    """What a reader has next; all of it once nothing more will come."""
    return reader.batches() if final else [records] if (records := reader.poll()) else []


def _words(state: State) -> str:
    text = f"{state.phase}, {state.world_size} ranks, {state.steps} steps"
    text = f"{text}, launched elsewhere" if state.launched_elsewhere else text
    text = f"{text}; {state.warning}" if state.warning else text
    return f"{text}: {state.cause.message}. {state.cause.advice}".rstrip() if state.cause else text


def measured(run: str, plan: ResolvedPlan) -> Measured:
    """An empty collection for records of a run of the complete `plan`."""
    return Measured(run, plan.world_size, int(plan.gpu.memory_gib * 2**30))


def profile_of(folder: str | Path) -> Profile:
    """What was measured in `folder`: a run directory, or an exported plan's folder that was
    launched by hand.

    Raises `PlanError` where it holds no plan.
    """
    folder = Path(folder).absolute()
    found = measured(folder.name, Plan.load(folder / "plan.yaml").resolve())
    profile = found.read(history(folder)).profile()
    profile.notes["run_dir"] = str(folder)
    told = {Path(path).name for path in profile.notes["checkpoints"]}
    untold = [str(path) for path in finished(folder / "checkpoints") if path.name not in told]
    profile.notes["checkpoints"] = sorted(
        [*profile.notes["checkpoints"], *untold], key=lambda path: Path(path).name
    )
    return profile


def keep_frames(folder: Path) -> None:
    """Write what was measured in a run directory into its `frames/`, every step of it. Raises
    OSError, `PlanError`.
    """
    found = measured(folder.name, Plan.load(folder / "plan.yaml").resolve())
    keep(found, Reader(folder), folder / "frames")


def start(
    plan: Plan,
    *,
    root: str | Path | None = None,
    force: bool = False,
    resume: str | Path | Run | None = None,
    port: int | None = None,
    allow_code: bool = False,
    progress: Told = lambda words: None,
    _recipe: Recipe | None = None,
) -> Run:
    """Start `plan` on this machine and return at once; the run goes on when this process ends.

    `root` holds run directories (default $WORKBENCH_RUNS, else ./runs); `resume` is a run, its
    directory, or one of its checkpoints to go on from; `port` is where ranks meet (default: a free
    one); `force` as in `preflight`; `allow_code` runs a model that is code; `progress` is told how
    far the check of the checkpoint's files is. Raises `PlanError` with everything that stands
    against it; then nothing has been written.
    """
    if resume is not None:
        source = resume.dir if isinstance(resume, Run) else resume
        plan = plan.replace(**{"checkpoint.load": str(checkpoint_of(source))})
    if problems := preflight(plan, root=root, port=port, force=force, allow_code=allow_code):
        raise PlanError(problems)
    if load := plan.checkpoint.load:
        refuse_damaged(Path(load), progress)
    full, recipe, meeting = plan.pin(), _recipe or Recipe(), checked_port(port)
    _clear_former(full)

    def fill(folder: Path, final: Path) -> None:
        (folder / "plan.yaml").write_text(
            _with_calibration(full, folder, final).to_yaml(), encoding="utf-8"
        )
        (folder / "accelerate.yaml").write_text(
            yaml_files.dump(export.accelerate_config(full, meeting)), encoding="utf-8"
        )
        write_command(
            folder, compose(full, final, meeting, recipe, allow_code and full.code is not None)
        )
        write_state(folder, first_state(full.world_size, full.training.steps))

    folder = create(default_root(root), full.name, fill)
    _supervise(folder)
    return Run(folder)


def _clear_former(plan: Plan) -> None:
    """Free the disk of what the run that `plan` goes on from was writing when it was killed."""
    load = plan.checkpoint.load
    if load is not None and is_run(Path(load).parent.parent):
        clear(Path(load).parent)


def _with_calibration(plan: ResolvedPlan, folder: Path, final: Path) -> ResolvedPlan:
    """The plan with a calibration of its own: the machine may be measured anew while the run is
    kept.
    """
    source = plan.cluster.calibration
    if source is None:
        return plan
    shutil.copyfile(source, folder / CALIBRATION)
    return plan.with_fields(**{"cluster.calibration": str(final / CALIBRATION)})


def _supervise(folder: Path) -> None:
    """Start the supervisor in a session of its own: neither Ctrl-C nor the end of a notebook kernel
    reaches it.
    """
    with (folder / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [*python_module("workbench.runs.launch.supervisor"), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name=f"reap {process.pid}", daemon=True).start()


def attach(folder: str | Path) -> Run:
    """The run in `folder`, from any process at any time. Raises `ValueError` where it is no run
    directory.
    """
    return Run(folder)


def list_runs(root: str | Path | None = None) -> list[Run]:
    """Runs kept in `root` (default as in `start`), latest first."""
    folder = default_root(root)
    names = sorted(os.listdir(folder), reverse=True) if folder.is_dir() else []
    return [Run(folder / name) for name in names if name[0] != "." and is_run(folder / name)]
