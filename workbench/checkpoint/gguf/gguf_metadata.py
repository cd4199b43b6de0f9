"""Checks of a GGUF file's metadata against a plan's model, without torch."""

from __future__ import annotations

from pathlib import Path

from workbench.checkpoint.resume_point import refuse_other_model
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
    refuse_other_model(FIELD, path, theirs, shape)
    return file
