"""What was fitted to published readings of memory: the allocator's slack, and how far readings lie
from predictions on sites that the fit has not seen.

`data/fitted_memory.json` is written by `python -m workbench.planner.fitting --memory` and by
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench import data_files

FITTED_MEMORY_FILE = "data/fitted_memory.json"


@dataclass(frozen=True)
class MemoryFit:
    """A fit to the readings of some sites."""

    slack: float = 0.0
    """Share by which what the allocator reserves exceeds what it handed out."""
    named: tuple[float, float, float] = (0.8, 1.0, 1.25)
    """5, 50 and 95 % quantiles of a reading over its prediction; the default stands before
    anything was fitted.
    """
    unnamed: tuple[float, float, float] = (0.5, 1.0, 2.0)
    """The same where the framework is not known."""

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain data, rounded."""
        return {
            "slack": round(self.slack, 4),
            "named": [round(value, 4) for value in self.named],
            "unnamed": [round(value, 4) for value in self.unnamed],
        }


def memory_fit_of(found: Mapping[str, Any]) -> MemoryFit:
    """A fit that `to_dict` wrote."""
    return MemoryFit(found["slack"], tuple(found["named"]), tuple(found["unnamed"]))


@lru_cache(maxsize=1)
def fitted_memory_document() -> Mapping[str, Any]:
    """The content of `FITTED_MEMORY_FILE`."""
    path = data_files.assets() / FITTED_MEMORY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@lru_cache(maxsize=1)
def published_memory_fit() -> MemoryFit:
    """The fit to all published readings."""
    document = fitted_memory_document()
    return memory_fit_of(document["fit"]) if document else MemoryFit()


@lru_cache(maxsize=64)
def memory_fit_without(site: str) -> MemoryFit:
    """The fit from which the readings of `site` were absent: the published one for a site without
    any.
    """
    found = fitted_memory_document().get("without", {}).get(site)
    return published_memory_fit() if found is None else memory_fit_of(found)
