"""Checks of a Hugging Face folder's config.json against a plan's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.checkpoint.resume_point import CONFIG, refuse_other_model
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.catalog import huggingface_config
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.model.model_shape import Shape

FIELD = "checkpoint.load"


def refuse_inexpressible(shape: Shape, family: Family) -> None:
    """Check that a family's names and config.json can express a model.

    Raises:
        PlanError: Names every field that they cannot express.
    """
    found = [
        Problem(
            f"model.{name}",
            f"is {_shown(value)}, which {family.classes}'s names and config.json cannot express; "
            f"legal: {' or '.join(map(_shown, can))}",
        )
        for name, (value, can) in family.unmet(shape).items()
    ]
    if found:
        raise PlanError(found)


def _shown(value: Any) -> str:
    """A value as a plan writes it; a section by whether it is there."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str | int | float) else "set"


def check_config(folder: Path, shape: Shape) -> Family:
    """The family of the folder's config.json, which is to be that of a model of the plan's shape.

    Raises:
        PlanError: Names every field that differs.
    """
    path = folder / CONFIG
    try:
        theirs = huggingface_config.read_huggingface_config(str(path))
    except PlanError as error:  # which names the model, as if the plan's were read
        raise PlanError([Problem(FIELD, one.message) for one in error.problems]) from None
    config = json.loads(path.read_text(encoding="utf-8"))
    family = FAMILIES[config["model_type"]]
    if family.names is None:
        legal = ", ".join(name for name, known in FAMILIES.items() if known.names)
        raise refuse(
            FIELD, f"'{path}' has model_type '{family.model_type}'; weights are read of {legal}"
        )
    refuse_other_model(FIELD, path, theirs, shape)
    return family
