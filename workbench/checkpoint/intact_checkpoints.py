"""Choice of the checkpoint that training resumes from: of a run its newest intact one."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.checkpoint.checksums import (
    MAX_PREFLIGHT_BYTES,
    CheckProgress,
    another_checkpoint,
    damage,
    refuse_damaged,
)
from workbench.checkpoint.manifest import MANIFEST
from workbench.checkpoint.resume_point import STEP, is_gguf, is_huggingface_folder, step_folders
from workbench.errors import PlanError, refuse
from workbench.plan.schema import Plan
from workbench.safe_io.json_field_checks import has, object_, one_of, text


def checkpoint_of(source: str | Path, field: str = "resume") -> Path:
    """The checkpoint that `source` names, by manifests and sizes; see `choose_checkpoint`."""
    return choose_checkpoint(source, field)[0]


def choose_checkpoint(
    source: str | Path, field: str = "resume", progress: CheckProgress | None = None
) -> tuple[Path, list[str]]:
    """The checkpoint that `source` names, and what was skipped for it, in words.

    Args:
        source: A checkpoint, or a run directory: its newest intact checkpoint without NaN or
            infinity, or where it has none the checkpoint that the run resumed from.
        field: Field that errors name.
        progress: As of `checksums.damage`: None leaves checksums out.

    Raises:
        PlanError: There is none, or none that is intact; names each that is not, and why.
    """
    path = Path(source).absolute()
    if (path / "state.json").is_file():
        return _newest_intact(path, field, progress)
    if (path / MANIFEST).is_file():
        if progress is not None:
            refuse_damaged(path, progress)
        return path, []
    if STEP.fullmatch(path.name) and path.is_dir():
        raise refuse(field, f"{damage(path)}; {another_checkpoint(path)}")
    why = "is neither run nor checkpoint" if path.exists() else "does not exist"
    raise refuse(field, f"{path} {why}; legal: a run directory, or one of its checkpoints")


def newest_intact(
    folder: Path, progress: CheckProgress | None = None, most_bytes: int = MAX_PREFLIGHT_BYTES
) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint in a folder of them, and why newer ones are not; arguments as of
    `damage`. Older ones are not read.
    """
    skipped: list[str] = []
    for path in reversed(step_folders(folder)):
        if not (why := damage(path, progress, most_bytes)):
            return path, skipped
        skipped.append(why)
    return None, skipped


def _newest_intact(run: Path, field: str, progress: CheckProgress | None) -> tuple[Path, list[str]]:
    found, damaged = newest_intact(run / "checkpoints", progress)
    skipped = [f"skipped {why}" for why in damaged]
    if found is not None:
        return found, skipped
    origin, unknown = _origin(run)
    if origin is None and not damaged:
        failed = f", for the run failed: {cause}" if (cause := _failure(run)) else ""
        why = unknown or failed or "; set checkpoint.every, or stop a run with a checkpoint"
        raise refuse(field, f"{run} holds no checkpoint{why}")
    if origin is not None:
        gone = "" if (origin / MANIFEST).is_file() else f"the one it resumed from is gone: {origin}"
        if not (why := gone or damage(origin, progress)):
            return origin, skipped
        damaged.append(why)
    remedy = "resume from an earlier run"
    if any("NaN" in why for why in damaged):
        remedy += ", with a lower training.optimizer.learning_rate"
    raise refuse(field, f"{run} holds no intact checkpoint: {'; '.join(damaged)}; {remedy}")


def _origin(run: Path) -> tuple[Path | None, str]:
    """The checkpoint that the run in `run` resumed from; None where it did not, or why that is not
    known.
    """
    try:
        load = Plan.load(run / "plan.yaml").checkpoint.load
    except PlanError as error:
        return None, f", and its plan cannot be read: {error}"
    if load is None or is_gguf(Path(load)) or is_huggingface_folder(Path(load)):
        return None, ""
    return Path(load), ""


def _failure(run: Path) -> str | None:
    """Cause by which the run in `run` failed; None where it did not, or nobody knows."""
    try:
        state = json.loads((run / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not has(state, {"phase": one_of("failed"), "cause": object_}):
        return None
    cause = state["cause"]
    return " ".join(cause["message"].split()) if has(cause, {"message": text}) else None
