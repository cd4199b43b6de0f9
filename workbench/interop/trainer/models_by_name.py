"""The model that a trainer's file names: of the catalog by its name on the Hub, or a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from workbench.interop.trainer.arguments import Arguments
from workbench.interop.trainer.files_beside import folder
from workbench.interop.translation import STAND_IN, ImportOptions, lacks
from workbench.plan.catalog import catalog
from workbench.untrusted_text import shown

_HUB = re.compile(r"(?:^|\s)([A-Za-z][\w.-]+/[\w.-]+) (?:config|model card)")
"""A name on the Hub in a source of the catalog."""
_TUNED = re.compile(r"-(?:instruct|chat|base|it|hf)(?=-|$)|^meta-")
"""What stands in a name and leaves the shape as it is."""
_FIRST = re.compile(r"(?<=x\d\db)-v0\.1$|(?<=x\db)-v0\.1$")
"""The first version of a mixture, which the catalog's entry is without saying so."""


def model_of(a: Arguments, given: ImportOptions) -> str | dict[str, Any]:
    """The plan's `model`: given beside the file, else what the file names. Raises `PlanError`."""
    key = a.key("model")
    if given.model is not None:
        if (said := a.keys.text(key)) is not None:
            a.keys.translated.remove(key)
            a.keys.ignore(key, said, "what the file names; the model is given beside it")
        return given.the_model("")
    name = a.keys.text(key)
    if name is None:
        return given.the_model(f"the file has no {key}")
    if (path := folder(name, given)) is not None:
        return str(path / "config.json")
    if found := by_hub_name(name):
        if name.lower() not in (found, _hub_names()[found].lower()):
            a.keys.assume("model", found, f"{shown(name)} has its shape, by its name")
        return found
    raise lacks(
        "model",
        f"{key} is {shown(name)}, which is none of `workbench models` by its name on the Hub, and "
        "no folder that can be read; give model (--model), e.g. its config.json",
        STAND_IN,
    )


def weights(name: str | None, given: ImportOptions) -> str | None:
    """The folder of weights that the file names, if it is here."""
    path: Path | None = folder(name, given) if name else None
    return str(path) if path is not None and any(path.glob("*.safetensors")) else None


def by_hub_name(name: str) -> str | None:
    """The catalog's name for a model of the Hub, tuned ones as the base that they have the shape
    of; None where it has none.
    """
    ours = _hub_names()
    exact = {hub.lower(): entry for entry, hub in ours.items()}
    bare = {_bare(hub): entry for entry, hub in ours.items()}
    return exact.get(name.lower()) or bare.get(_bare(name))


def _hub_names() -> dict[str, str]:
    """Entry of the catalog -> its name on the Hub, its own where its source names none."""
    found = {name: _HUB.search(entry.source) for name, entry in catalog.models().items()}
    return {name: match[1] if match else name for name, match in found.items()}


def _bare(name: str) -> str:
    return _FIRST.sub("", _TUNED.sub("", name.rpartition("/")[2].lower()))
