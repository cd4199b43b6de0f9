"""What an earlier launch left in a run directory: an exported plan may be launched again, by its
user or by a batch system whose node has failed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from workbench.checkpoint import resume_point
from workbench.checkpoint.checksums import MAX_PREFLIGHT_BYTES, damage
from workbench.checkpoint.intact_checkpoints import newest_intact
from workbench.checkpoint.manifest import read_manifest
from workbench.errors import refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

RECORDS = (("telemetry", "jsonl"), ("errors", "json"))
"""Folder of a run directory, and suffix of a rank's file there."""


def go_on(plan: ResolvedPlan, run_dir: Path) -> tuple[ResolvedPlan, list[str]]:
    """The plan, from the newest intact checkpoint in its own run directory, if there is one, and
    why newer ones are not, in words. Each rank calls it.

    Raises:
        PlanError: There are checkpoints, and none is intact.
    """
    most = MAX_PREFLIGHT_BYTES // plan.world_size  # every rank reads the same files
    latest, damaged = newest_intact(run_dir / "checkpoints", lambda words: None, most)
    if latest is not None:
        return plan.with_fields(**{"checkpoint.load": str(latest)}), [
            f"skipped {why}" for why in damaged
        ]
    if damaged:
        why = f"{run_dir} holds no intact checkpoint: {'; '.join(damaged)}"
        raise refuse("checkpoint", f"{why}; legal: to move them away, or a plan in another folder")
    return plan, []


def nothing_left(plan_path: Path) -> str:
    """Why a plan has nothing left to train: an earlier launch is through; empty where it is not."""
    with suppress(OSError, ValueError, KeyError):  # reported where the plan is trained
        plan, run_dir = Plan.load(plan_path).resolve(), plan_path.parent
        latest, _ = newest_intact(run_dir / "checkpoints")
        if latest is not None:
            steps = resume_point.steps_done(latest, read_manifest(latest)["meta"], plan)
            words = f"{latest.name} of an earlier launch in {run_dir}"
            problems = resume_point.nothing_left(words, steps, plan)
            if problems and not damage(latest, lambda words: None):
                return str(problems[0])
    return ""


def set_aside_records(run_dir: Path, rank: int) -> None:
    """Rename this rank's files of an earlier launch, to a name of their own for each launch."""
    for folder, suffix in RECORDS:
        path = run_dir / folder / f"rank{rank:05d}.{suffix}"
        if path.exists():
            former = (path.with_name(f"before-{n}-{path.name}") for n in range(1, 10**6))
            path.replace(next(name for name in former if not name.exists()))
