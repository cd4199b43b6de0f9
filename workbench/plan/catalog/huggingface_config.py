"""A Hugging Face `config.json` as a shape, by the table of families; others are refused by name.

What a configuration computes beyond the fields of a shape (stretched rotary frequencies, say) is
kept as the shape's `unmodelled`: it is estimated and rehearsed without, and refused where it would
run.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from workbench.errors import PlanError, refuse
from workbench.fields.validation_messages import plan_error
from workbench.plan.catalog.families.family import Config
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.catalog.float8_weights import note_quantization
from workbench.plan.catalog.huggingface_code import note_other_classes
from workbench.plan.catalog.huggingface_keys import Account, Reading
from workbench.plan.model.model_shape import Shape
from workbench.safe_io import json_files
from workbench.safe_io.files import read_some, unread
from workbench.untrusted_text import shown

MOST_BYTES = 16 * 2**20
"""Of a config.json: the largest published are a thousandth of it."""


def read_huggingface_config(path: str) -> Shape:
    """The shape that a config.json, or the folder that holds one, describes.

    Raises `PlanError` naming `model` where the file is missing, is no configuration, or is of a
    family not known here.
    """
    return _read(path)[0]


def account(path: str) -> Account:
    """What `read_huggingface_config` makes of each key of the configuration at `path`. Raises
    `PlanError` as it does.
    """
    reading = _read(path)[1]
    return reading.tried_account(FAMILIES[reading.config["model_type"]].read)


def _read(path: str) -> tuple[Shape, Reading]:
    file = Path(path) / "config.json" if os.path.isdir(path) else Path(path)
    try:
        config = json_files.parse(read_some(file, MOST_BYTES), where="", constants=True)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("model", f"'{file}' cannot be read: {unread(error)}") from None
    except PlanError as error:
        why = f"{error.problems[0].field} {error.problems[0].message}".strip()
        raise refuse("model", f"'{file}' is no model configuration: {why}") from None
    if not isinstance(config, dict):
        raise refuse(
            "model", f"'{file}' is no model configuration: it holds {shown(config)}, not a mapping"
        )
    name = config.get("_name_or_path")
    reading = Reading(config, str(file))
    return _shape(
        reading, name if isinstance(name, str) and name else file.resolve().parent.name
    ), reading


def shape_of(config: Config, name: str = "custom", where: str = "config.json") -> Shape:
    """The shape of a configuration already read."""
    return _shape(Reading(config, where), name)


def _shape(reading: Reading, name: str) -> Shape:
    family = reading.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        legal = ", ".join(sorted(FAMILIES))
        raise refuse("model", f"'{reading.where}' has model_type {shown(family)}; legal: {legal}")
    known = FAMILIES[family]
    fields = {key: value for key, value in known.read(reading).items() if value is not None}
    note_other_classes(reading, known)
    note_quantization(reading)
    if lacking := reading.account().not_modelled:
        fields["unmodelled"] = "; ".join(lacking.values())
    try:
        return Shape.model_validate({"name": name, **fields})
    except ValidationError as error:
        raise plan_error(error, fields, Shape) from None
