"""What an earlier launch left in a run directory: an exported plan may be launched again, by its
user or by a batch system whose node has failed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from workbench.checkpoint.manifest import is_finite, read_manifest
from workbench.checkpoint.resume_point import finished_checkpoints, steps_done
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

RECORDS = (("telemetry", "jsonl"), ("errors", "json"))
"""Folder of a run directory, and suffix of a rank's file there."""


def go_on(plan: ResolvedPlan, run_dir: Path) -> ResolvedPlan:
    """The plan, from the last finite checkpoint in its own run directory, if there is one."""
    latest = _latest(run_dir)
    return plan if latest is None else plan.with_fields(**{"checkpoint.load": str(latest)})


def nothing_left(plan_path: Path) -> str:
    """Why a plan has nothing left to train: an earlier launch is through; empty where it is not."""
    with suppress(OSError, ValueError, KeyError):  # reported where the plan is trained
        plan, latest = Plan.load(plan_path).resolve(), _latest(plan_path.parent)
        if latest is not None:
            meta, asked = read_manifest(latest)["meta"], plan.training.steps
            if (done := steps_done(latest, meta, plan)) >= asked:
                return (
                    f"training.steps: is {asked}, and {latest.name} of an earlier launch in "
                    f"{plan_path.parent} has done {done}; legal: more steps, or a plan in another "
                    "folder"
                )
    return ""


def set_aside_records(run_dir: Path, rank: int) -> None:
    """Rename this rank's files of an earlier launch, to a name of their own for each launch."""
    for folder, suffix in RECORDS:
        path = run_dir / folder / f"rank{rank:05d}.{suffix}"
        if path.exists():
            former = (path.with_name(f"before-{n}-{path.name}") for n in range(1, 10**6))
            path.replace(next(name for name in former if not name.exists()))


def _latest(run_dir: Path) -> Path | None:
    """The last checkpoint without NaN or infinity."""
    found = reversed(finished_checkpoints(run_dir / "checkpoints"))
    return next((path for path in found if is_finite(path)), None)
