"""A run, read from its directory: any process can attach to it, at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.checkpoint.resume_point import finished_checkpoints
from workbench.errors import refuse
from workbench.plan.model.four_bit_base import four_bit_notes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.store.rank_logs import last_lines
from workbench.runs.store.run_directory import default_root
from workbench.runs.store.run_liveness import continue_supervisor, read_state
from workbench.runs.store.run_state import State, is_run
from workbench.runs.store.stop_request import GRACE_SECONDS, Stop, request_stop
from workbench.runs.store.telemetry_frames import MeasuredFrames, write_frames
from workbench.runs.store.telemetry_reader import Reader, history
from workbench.units import GIB
from workbench.untrusted_text import escaped

POLL_SECONDS = 0.1


class Run:
    """The run in a directory; a view, which neither starts nor ends anything by itself."""

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

    def measured(self) -> MeasuredFrames:
        """An empty collection for this run's records; feed it from a `Reader` to follow the run."""
        return measured_frames(self.id, self.plan)

    def profile(self) -> Profile:
        """What has been measured so far."""
        return profile_of(self.dir)

    def wait(
        self,
        timeout: float | None = None,
        progress: Callable[[list[dict[str, Any]]], None] | None = None,
        seen: Callable[[State], None] | None = None,
    ) -> State:
        """Wait until the run is over.

        Args:
            timeout: Seconds; None waits as long as the run's supervisor lives.
            progress: Called with new telemetry records as they come.
            seen: Called with the state at every poll.

        Returns:
            The last state.

        Raises:
            TimeoutError: The run goes on after `timeout`.
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

        Args:
            checkpoint: Save a checkpoint first.
            grace_seconds: Ranks that go on longer are ended, but not those of a run that was
                launched elsewhere.
        """
        if not (state := self.state).final:
            request_stop(self.dir, Stop(checkpoint, grace_seconds))
            continue_supervisor(state)

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
    text = "; ".join([text, *state.notes, *([state.warning] if state.warning else [])])
    return f"{text}: {state.cause.message}. {state.cause.advice}".rstrip() if state.cause else text


def measured_frames(run: str, plan: ResolvedPlan) -> MeasuredFrames:
    """An empty collection for records of a run of the complete `plan`."""
    return MeasuredFrames(run, plan.world_size, int(plan.gpu.memory_gib * GIB))


def profile_of(folder: str | Path) -> Profile:
    """What was measured in `folder`: a run directory, or an exported plan's folder that was
    launched by hand.

    Raises `PlanError` where it holds no plan.
    """
    folder = Path(folder).absolute()
    plan = Plan.load(folder / "plan.yaml").resolve()
    profile = measured_frames(folder.name, plan).read(history(folder)).profile()
    profile.notes.update(four_bit_notes(plan))
    profile.notes["run_dir"] = str(folder)
    recorded = {Path(path).name for path in profile.notes["checkpoints"]}
    unrecorded = [
        str(path)
        for path in finished_checkpoints(folder / "checkpoints")
        if path.name not in recorded
    ]
    profile.notes["checkpoints"] = sorted(
        [*profile.notes["checkpoints"], *unrecorded], key=lambda path: Path(path).name
    )
    return profile


def keep_frames(folder: Path) -> None:
    """Write what was measured in a run directory into its `frames/`, every step of it. Raises
    OSError, `PlanError`.
    """
    found = measured_frames(folder.name, Plan.load(folder / "plan.yaml").resolve())
    write_frames(found, Reader(folder), folder / "frames")


def attach(folder: str | Path) -> Run:
    """The run in `folder`, from any process at any time. Raises `ValueError` where it is no run
    directory.
    """
    return Run(folder)


def find_run(folder: str | Path, root: str | Path | None = None) -> Run:
    """The run in `folder`, or of that name under `root` (default as in `list_runs`).

    Raises:
        PlanError: There is no such run; the message names the latest ones.
    """
    runs_root = default_root(root)
    for path in (Path(folder), runs_root / folder):
        if is_run(path):
            return Run(path)
    known = ", ".join(run.id for run in list_runs(root)[:5])
    raise refuse(
        "run", f"'{folder}' is no run directory, nor a run in {runs_root}; there: {known or 'none'}"
    )


def list_runs(root: str | Path | None = None) -> list[Run]:
    """Runs in `root` (default $WORKBENCH_RUNS, else ./runs), latest first."""
    folder = default_root(root)
    names = sorted(os.listdir(folder), reverse=True) if folder.is_dir() else []
    return [Run(folder / name) for name in names if name[0] != "." and is_run(folder / name)]
