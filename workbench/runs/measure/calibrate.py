"""Calibration: measuring this machine in a child process, and learning from runs that have
finished.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import refuse
from workbench.machine.calibration_file import (
    Calibration,
    Scale,
    read_calibration,
    write_calibration,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.estimate import estimate
from workbench.planner.run_feedback import StepObservation, error, scale, step_observation
from workbench.runs.launch import child_process
from workbench.runs.run import Run

Progress = Callable[[float, float, str], None]
LEAST_SECONDS, MOST_SECONDS = 1.0, 3600.0
ROUNDS = 4
"""Of estimating again: overlap makes the step time nonlinear in the factors."""


def calibrate(seconds: float = 90.0, progress: Progress | None = None) -> Calibration:
    """Measure the attached machine in a child process, every point at least once.

    Args:
        seconds: About how long to measure, beside about a minute of preparing.
        progress: Called with (seconds done, seconds in all, what).

    Raises:
        PlanError: The time is out of range, or the catalog does not know the GPU.
        ChildError: A rank fails or hangs.
    """
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise refuse(
            "seconds",
            f"is {seconds:g}; legal: {LEAST_SECONDS:g} to {MOST_SECONDS:g}, and 90 is enough",
        )

    def on_line(text: str) -> None:
        if progress and text.startswith("{"):
            record = json.loads(text)
            progress(min(record["done"], record["of"]), record["of"], record["words"])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.yaml")
        child_process.python(
            "workbench.engine.calibrate", ["--seconds", str(seconds), "--to", str(path)], on_line
        )
        return read_calibration(path)


def calibrate_file(
    path: Path | None,
    seconds: float = 90.0,
    runs: Sequence[Run] = (),
    progress: Progress | None = None,
) -> Calibration:
    """Measure, or learn from `runs`, and write the result to `path`; see `workbench.calibrate`."""
    refuse_unwritable(path)
    base = _base(path, runs) if runs else None
    found = calibrate(seconds, progress) if base is None else base
    found = learn(found, runs) if runs else found
    if path is not None:
        write_calibration(found, path)
    return found


def _base(path: Path | None, runs: Sequence[Run]) -> Calibration | None:
    """The calibration that runs correct; None where there is none yet."""
    if path is not None and path.exists():
        return read_calibration(path)
    named = runs[0].plan.cluster.calibration
    return None if named is None else read_calibration(named)


def refuse_unwritable(path: Path | None) -> None:
    """Refuse a file that could not be written, before measuring takes its time."""
    if path is None:
        return
    device = path.exists() and not path.is_file()  # or a folder: neither is to be replaced
    if device or not _takes_files(path.resolve().parent):
        raise refuse(
            "--output", f"'{path}' cannot be written; legal: a file in a folder that exists"
        )


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made in it; permissions do not say it of /proc or a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def learn(calibration: Calibration, runs: Sequence[Run]) -> Calibration:
    """Fit the scale that brings estimates of `runs` to their measured median step times.

    Returns:
        The calibration with that scale, which holds the error without it and with it.

    Raises:
        PlanError: A run has no measured steps, or is of another GPU.
    """
    seen = [(run.plan, _measured(run)) for run in runs]
    bare = calibration.model_copy(update={"scale": None})
    before = _observations(bare, seen)
    found, best = Scale(), (error(before), Scale())
    rows = before
    for _ in range(ROUNDS):
        found = scale(rows, found)
        rows = _observations(bare.model_copy(update={"scale": found}), seen)
        best = min(best, (error(rows), found), key=lambda pair: pair[0])
    after, fitted = best
    names = {"runs": [run.id for run in runs], "error_before": error(before), "error_after": after}
    return calibration.model_copy(update={"scale": fitted.model_copy(update=names)})


def _measured(run: Run) -> float:
    seconds = run.profile().step_seconds
    if seconds is None:
        raise refuse(
            "run",
            f"{run.id} has {run.state.phase} without a measured step; give one that has trained",
        )
    return seconds


def _observations(
    calibration: Calibration, seen: Sequence[tuple[ResolvedPlan, float]]
) -> list[StepObservation]:
    """Each run with its estimate under `calibration`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.yaml")
        write_calibration(calibration, path)
        chosen = {"cluster.calibration": str(path), "cluster.calibration_sha256": None}
        return [
            step_observation(seconds, estimate(plan.replace(**chosen)).notes["time"])
            for plan, seconds in seen
        ]
