"""What was fitted to published measurements: a few multipliers of hardware and of frameworks.

Everything else in the cost model is a physical constant or documented behavior. `data/fitted.json`
is written by `python -m workbench.planner.fitting` and by nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.costmodel.frameworks.framework_profile import framework_table

FITTED_FILE = "data/fitted.json"
IN_STEP = "in_step"
"""Rate of GEMMs and attention within a step over the best that a benchmark of them reaches."""
HARDWARE_MULTIPLIERS = ("traffic", "launch", "nic")
"""Multipliers of constants of `data/planner.yaml` that hold for all GPUs."""


@dataclass(frozen=True)
class FittedConstants:
    """Logarithms of fitted multipliers, by name; what is absent is 1.

    Names: `in_step`, those of `HARDWARE_MULTIPLIERS`, and `framework.<profile>`.
    """

    logs: tuple[tuple[str, float], ...] = ()

    def log(self, name: str) -> float:
        """Logarithm of one multiplier."""
        return dict(self.logs).get(name, 0.0)

    def hardware(self, name: str) -> float:
        """Multiplier of one of `HARDWARE_MULTIPLIERS`."""
        return math.exp(self.log(name))

    def in_step(self) -> float:
        """Rate within a step over the best benchmark."""
        return math.exp(self.log(IN_STEP))

    def of_framework(self, stack: str) -> float:
        """Seconds of compute over what physics and documented behavior say, of a framework; of a
        version that no fit has seen, those of the framework.
        """
        known = {name for name, _ in self.logs}
        own = stack if f"framework.{stack}" in known else measured_profile(stack)
        return math.exp(self.log(f"framework.{own}"))


def fitted_constants(logs: Mapping[str, float]) -> FittedConstants:
    """Fitted constants of logarithms by name."""
    return FittedConstants(tuple(sorted(logs.items())))


@lru_cache(maxsize=1)
def fitted_document() -> Mapping[str, Any]:
    """The content of `FITTED_FILE`."""
    path = data_files.assets() / FITTED_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@lru_cache(maxsize=1)
def published_fit() -> FittedConstants:
    """The fit to all clean published rows."""
    return fitted_constants(fitted_document().get("constants", {}))


def retry_slowdown() -> float:
    """Seconds of a step whose allocator retries over those of one that has memory to spare; 1 where
    none was fitted.
    """
    return float(fitted_document().get("near_full", {}).get("slowdown", 1.0))


@lru_cache(maxsize=64)
def fit_without(site: str) -> FittedConstants:
    """The fit from which the rows of `site` were absent: the published one for a site without clean
    rows.
    """
    found = fitted_document().get("without", {}).get(site)
    return published_fit() if found is None else fitted_constants(found["constants"])


def measured_profile(stack: str) -> str:
    """The framework profile whose versions were measured together with `stack`."""
    return next(
        (name for name, entry in framework_table().items() if stack in entry.get("versions", {})),
        stack,
    )
