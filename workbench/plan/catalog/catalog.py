"""The catalog: models, GPUs, fabrics and strategies by name, read from `data/*.yaml` and
`strategies.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from workbench.data_files import read_data_file
from workbench.plan.model.model_shape import Shape


@dataclass(frozen=True)
class ModelEntry:
    """One model of the catalog: its shape, the published parameter count, and where both come
    from.
    """

    shape: Shape
    parameters: int | None
    source: str
    active_parameters: int | None = None


@dataclass(frozen=True)
class Preset:
    """One strategy of `strategies.yaml`; sizes may be rules (see the file's head) resolved with the
    plan.
    """

    name: str
    title: str
    source: str
    strategy: dict[str, Any] = field(hash=False)


@lru_cache(maxsize=1)
def models() -> dict[str, ModelEntry]:
    """Every model of `data/models.yaml` by name."""
    return {
        name: _model(name, dict(entry))
        for name, entry in read_data_file("data/models.yaml").items()
    }


def _model(name: str, entry: dict[str, Any]) -> ModelEntry:
    meta = {key: entry.pop(key, None) for key in ("parameters", "active_parameters", "source")}
    return ModelEntry(
        shape=Shape.model_validate({"name": name, **entry}),
        parameters=_count(meta["parameters"]),
        source=str(meta["source"] or ""),
        active_parameters=_count(meta["active_parameters"]),
    )


def _count(figure: float | None) -> int | None:
    return None if figure is None else round(figure)


@lru_cache(maxsize=1)
def strategies() -> dict[str, Preset]:
    """Every preset of `strategies.yaml` by name, in the file's order."""
    return {entry["name"]: Preset(**entry) for entry in read_data_file("strategies.yaml")}
