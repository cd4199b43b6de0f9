"""GPUs and fabrics by name, read from `data/gpus.yaml` and `data/clusters.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench.data_files import read_data_file
from workbench.machine.hardware import GPU, Fabric


@dataclass(frozen=True)
class GPUEntry:
    """One GPU of the catalog, the fabric it usually sits in, and the names its driver gives it."""

    gpu: GPU
    fabric: str
    driver_names: tuple[str, ...] = ()
    notes: str = ""


@lru_cache(maxsize=1)
def gpus() -> dict[str, GPUEntry]:
    """Every GPU of `data/gpus.yaml` by name; `local`, which depends on the machine, is not among
    them.
    """
    return {
        name: _gpu(name, dict(entry)) for name, entry in read_data_file("data/gpus.yaml").items()
    }


def _gpu(name: str, entry: dict[str, Any]) -> GPUEntry:
    fabric = str(entry.pop("fabric"))
    names, notes = tuple(entry.pop("driver_names", ())), str(entry.pop("notes", ""))
    return GPUEntry(GPU.model_validate({"name": name, **entry}), fabric, names, notes)


@lru_cache(maxsize=1)
def clusters() -> dict[str, Fabric]:
    """Every fabric of `data/clusters.yaml` by name."""
    entries = read_data_file("data/clusters.yaml")["fabrics"]
    return {name: Fabric.model_validate({"name": name, **entry}) for name, entry in entries.items()}


@lru_cache(maxsize=1)
def local_constants() -> dict[str, Any]:
    """The `local` section of `data/clusters.yaml`: what a CPU rank is taken to be."""
    return dict(read_data_file("data/clusters.yaml")["local"])


def default_fabric() -> str:
    """The fabric of a GPU that the catalog does not know."""
    return str(read_data_file("data/clusters.yaml")["default_fabric"])
