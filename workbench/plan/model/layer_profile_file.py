"""The layer profile that a plan's `model` names, and its hash."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from workbench.errors import refuse
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.layer_profile_csv import (
    layer_profile_text,
    parse_layer_profile,
    read_layer_profile,
)
from workbench.plan.schema import ProfiledModel
from workbench.safe_io.files import known_file, unread

SUFFIX = ".csv"
_parsed = lru_cache(maxsize=8)(parse_layer_profile)
"""The same file is looked at for every plan of a search."""


def profiled_model(model: object) -> ProfiledModel | None:
    """What a plan's `model` says of a layer profile; None where it is anything else."""
    if isinstance(model, ProfiledModel):
        return model
    if not isinstance(model, str):
        return None
    path, mark, name = model.rpartition(f"{SUFFIX}#")
    if mark:
        return ProfiledModel(layer_profile=path + SUFFIX, name=name)
    return ProfiledModel(layer_profile=model) if model.endswith(SUFFIX) else None


def pinned_profile(model: ProfiledModel) -> ProfiledModel:
    """The model with its own name and the hash of its file.

    Raises `PlanError` where the file cannot be used, or is no longer the one that the plan was
    resolved with.
    """
    path = model.layer_profile
    try:
        known_file(path)
    except OSError as error:
        raise refuse("model", f"'{path}' cannot be read: {unread(error)}") from None
    text = layer_profile_text(path)
    found = hashlib.sha256(text.encode()).hexdigest()
    if model.sha256 not in (None, found):
        what = f"the plan was resolved with {model.sha256}, '{path}' is now {found}"
        raise refuse("model.sha256", f"{what}; remove the field to use what is there")
    name = _parsed(text, model.name, path).model
    return model.model_copy(update={"name": name, "sha256": found})


@lru_cache(maxsize=64)
def layer_profile(model: ProfiledModel) -> LayerProfile:
    """The layers of a pinned model. Raises `PlanError` as `pinned_profile`."""
    pinned_profile(model)
    return read_layer_profile(model.layer_profile, model.name)
