"""Weights for other software, written in a process apart: what reads tensors needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.checkpoint.resume_point import checkpoint_of
from workbench.runs.launch import child_process


def export(
    source: str | Path, to: str | Path, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Any]:
    """Write the parameters of `source` (a checkpoint, or a run: its latest) into the new folder
    `to`; what was written.

    `progress(done, of, what)` counts bytes. Raises `PlanError` or ValueError where it is refused,
    `ChildError` where it fails.
    """
    told: dict[str, Any] = {}

    def line(text: str) -> None:
        nonlocal told
        if text.startswith("{"):
            told = json.loads(text)
            if progress and "done" in told:
                progress(told["done"], told["of"], told["what"])

    checkpoint, folder = checkpoint_of(source, "SOURCE"), Path(to).absolute()
    child_process.python(
        "workbench.engine.export_weights", [str(checkpoint), "--to", str(folder)], line
    )
    return {"source": str(checkpoint), **told}
