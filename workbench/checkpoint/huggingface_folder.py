"""Checks of a Hugging Face folder's config.json against a plan's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.checkpoint.resume_point import CONFIG, shape_problems
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.catalog import huggingface_config
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.model.model_shape import Shape

FIELD = "checkpoint.load"


def refuse_inexpressible(shape: Shape) -> None:
    """Check that Llama's names and config.json can express a model.

    Raises:
        PlanError: Names every field that they cannot express.
    """
    legal: list[tuple[str, Any, bool, str]] = [
        ("positions", shape.positions, shape.positions == "rope", "rope"),
        ("norm", shape.norm, shape.norm == "rmsnorm", "rmsnorm"),
        ("mlp", shape.mlp, shape.gated, "swiglu or geglu"),
        ("embedding_norm", shape.embedding_norm, not shape.embedding_norm, "false"),
        ("moe", "set", shape.moe is None, "null"),
        ("mla", "set", shape.mla is None, "null"),
        (
            "heads",
            shape.heads,
            shape.hidden % shape.heads == 0,
            f"a divisor of hidden = {shape.hidden}",
        ),
    ]
    found = [
        Problem(
            f"model.{field}",
            f"is {value!r}, which Llama's names and config.json cannot express; legal: {can}",
        )
        for field, value, fits, can in legal
        if not fits
    ]
    if found:
        raise PlanError(found)


def check_config(folder: Path, shape: Shape) -> None:
    """Check that the folder's config.json is that of a Llama-style model of the plan's shape.

    Raises:
        PlanError: Names every field that differs.
    """
    path = folder / CONFIG
    theirs = huggingface_config.read_huggingface_config(str(path))
    config = json.loads(path.read_text(encoding="utf-8"))
    if FAMILIES[config["model_type"]].names is None:
        legal = ", ".join(name for name, family in FAMILIES.items() if family.names)
        raise refuse(
            FIELD, f"'{path}' has model_type '{config['model_type']}'; weights are read of {legal}"
        )
    if theirs.unmodelled:
        raise refuse(
            FIELD,
            f"'{path}' has {theirs.unmodelled}; weights are read only of models that the fields "
            "of a plan's model describe completely",
        )
    refuse_inexpressible(shape)
    if problems := shape_problems(f"in {path} it", theirs, shape):
        raise PlanError(problems)
