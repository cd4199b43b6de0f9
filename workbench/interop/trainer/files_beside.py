"""Files that a trainer's file names: a DeepSpeed JSON, FSDP's settings, a model's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.interop.foreign_text import from_hjson, mapping
from workbench.interop.translation import ImportOptions, lacks
from workbench.untrusted_text import shown

LARGEST = 4 * 2**20
"""Bytes of the largest file that is read."""
ABOVE = 4
"""Folders above the file's own from which a path may begin: a repository's root, as its examples
count.
"""


def section(
    value: Any, key: str, given: ImportOptions, stand_in: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """(the settings at `key`, how a message begins their names): written there, or in the file that
    it names.

    Raises `PlanError` that asks for a file which is not there; `stand_in` would do without.
    """
    if isinstance(value, Mapping):
        return dict(value), f"{key}."
    path = _file(value, given) if isinstance(value, str) else None
    if path is None:
        where = (
            f"beside this file, or above it, in {given.folder}" if given.folder else "to be read"
        )
        raise lacks(
            key,
            f"names {shown(value)}, which is no file of up to {LARGEST >> 20} MiB {where}; put it "
            "there, or write its settings in place of its name",
            stand_in,
        )
    name = str(value)
    return mapping(from_hjson(path.read_text("utf-8-sig", "replace"), name), name), f"{name}: "


def _file(name: str, given: ImportOptions) -> Path | None:
    found = (path for path in _places(name, given) if path.is_file())
    return next((path for path in found if path.stat().st_size <= LARGEST), None)


def folder(name: str, given: ImportOptions) -> Path | None:
    """The folder with a config.json that `name` is, if it is one."""
    places = [Path(name)] if Path(name).is_absolute() else list(_places(name, given))
    return next((path for path in places if os.path.isfile(path / "config.json")), None)


def _places(name: str, given: ImportOptions) -> Iterator[Path]:
    """Where `name` is: from the file's folder or one above it on, and nowhere outside them."""
    if given.folder is None or Path(name).is_absolute():
        return
    base = given.folder.resolve()
    for start in (base, *list(base.parents)[:ABOVE]):
        for path in (start / name, *([base / Path(name).name] if start == base else [])):
            if os.path.exists(path) and path.resolve().is_relative_to(start):
                yield path
