"""The catalog: models, cards, fabrics and strategies by name, read from `data/*.yaml` and
`strategies.yaml`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.plan.model_shape import Shape
from workbench.plan.schema import Card, Fabric
from workbench.safe_io import yaml_files


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
class CardEntry:
    """One card of the catalog, the fabric it usually sits in, and the names its driver gives it."""

    card: Card
    fabric: str
    driver_names: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True)
class Preset:
    """One strategy of `strategies.yaml`; sizes may be rules (see the file's head) resolved with the
    plan.
    """

    name: str
    title: str
    source: str
    strategy: dict[str, Any] = field(hash=False)


def assets() -> Path:
    """The folder that holds `data/` and `strategies.yaml`: inside the wheel, else the checkout's
    root.
    """
    package = Path(__file__).resolve().parents[2]
    packed = package / "_assets"
    return packed if packed.is_dir() else package.parent


def read(relative: str) -> Any:
    """The content of one catalog file, by its path below `assets()`. Raises `PlanError` if it is
    missing or broken.
    """
    path = assets() / relative
    if not path.is_file():
        raise refuse(
            "", f"the catalog file {relative} is missing beside the package; reinstall workbench"
        )
    return yaml_files.parse(path.read_text(encoding="utf-8"), where=relative)


@lru_cache(maxsize=1)
def models() -> dict[str, ModelEntry]:
    """Every model of `data/models.yaml` by name."""
    return {name: _model(name, dict(entry)) for name, entry in read("data/models.yaml").items()}


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
def gpus() -> dict[str, CardEntry]:
    """Every card of `data/gpus.yaml` by name; `local`, which depends on the machine, is not among
    them.
    """
    return {name: _card(name, dict(entry)) for name, entry in read("data/gpus.yaml").items()}


def _card(name: str, entry: dict[str, Any]) -> CardEntry:
    fabric = str(entry.pop("fabric"))
    names, notes = tuple(entry.pop("driver_names", ())), str(entry.pop("notes", ""))
    return CardEntry(Card.model_validate({"name": name, **entry}), fabric, names, notes)


@lru_cache(maxsize=1)
def clusters() -> dict[str, Fabric]:
    """Every fabric of `data/clusters.yaml` by name."""
    entries = read("data/clusters.yaml")["fabrics"]
    return {name: Fabric.model_validate({"name": name, **entry}) for name, entry in entries.items()}


@lru_cache(maxsize=1)
def local_constants() -> dict[str, Any]:
    """The `local` section of `data/clusters.yaml`: what a CPU rank is taken to be."""
    return dict(read("data/clusters.yaml")["local"])


@lru_cache(maxsize=1)
def strategies() -> dict[str, Preset]:
    """Every preset of `strategies.yaml` by name, in the file's order."""
    return {entry["name"]: Preset(**entry) for entry in read("strategies.yaml")}


def unknown(field_name: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a name that the catalog does not have: close names first, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else ""
    return refuse(field_name, f"'{name}' is not known; {hint or 'legal: ' + ', '.join(known)}")


def default_fabric() -> str:
    """The fabric of a card that the catalog does not know."""
    return str(read("data/clusters.yaml")["default_fabric"])
