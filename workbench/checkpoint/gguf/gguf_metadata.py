"""Checks of a GGUF file's metadata against a plan's model, without torch."""

from __future__ import annotations

from pathlib import Path

from workbench.checkpoint.resume_point import shape_problems
from workbench.errors import PlanError, refuse
from workbench.plan.catalog.gguf_config import gguf_shape
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import GgufFile, open_gguf

FIELD = "checkpoint.load"


def check_gguf(path: Path, shape: Shape) -> GgufFile:
    """Check that a GGUF file's metadata are those of the plan's model.

    Raises:
        PlanError: Names every field that differs.
    """
    file = open_gguf(path, FIELD)
    theirs = gguf_shape(file, FIELD)
    if theirs.unmodelled:
        raise refuse(
            FIELD,
            f"'{path}' has {theirs.unmodelled}; weights are read only of models that the fields "
            "of a plan's model describe completely",
        )
    if problems := shape_problems(f"in {path} it", theirs, shape):
        raise PlanError(problems)
    return file
