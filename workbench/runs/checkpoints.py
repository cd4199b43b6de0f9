"""Which checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

from workbench.plan.errors import refuse
from workbench.runs.reader import Reader

MANIFEST = "manifest.json"
"""What every whole checkpoint holds."""


def saved(folder: Path) -> list[Path]:
    """Whole checkpoints that still exist of the run in `folder`, earliest first: a rank reports one when it is done."""
    paths = [Path(record["path"]) for record in Reader(folder).poll() if record["kind"] == "checkpoint"]
    found = dict.fromkeys(folder / "checkpoints" / path.name for path in paths)
    return sorted(path for path in found if path.is_dir())


def checkpoint_of(source: str | Path) -> Path:
    """The checkpoint meant by `source`: a checkpoint itself, or the latest of a run directory.

    Raises `PlanError` where there is none.
    """
    path = Path(source).absolute()
    if not (path / "state.json").is_file():
        if (path / MANIFEST).is_file():
            return path
        why = "is neither run nor checkpoint" if path.exists() else "does not exist"
        raise refuse("resume", f"{path} {why}; legal: a run directory, or one of its checkpoints")
    found = saved(path)
    if not found:
        raise refuse("resume", f"{path} holds no checkpoint; set checkpoint.every, or stop a run with a checkpoint")
    return found[-1]
