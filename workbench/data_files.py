"""The files that come with the package: `data/` and `strategies.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.safe_io import yaml_files


def assets() -> Path:
    """The folder that holds `data/` and `strategies.yaml`: inside the wheel, else the checkout's
    root.
    """
    package = Path(__file__).resolve().parents[0]
    packed = package / "_assets"
    return packed if packed.is_dir() else package.parent


def read_data_file(relative: str) -> Any:
    """The content of one catalog file, by its path below `assets()`. Raises `PlanError` if it is
    missing or broken.
    """
    path = assets() / relative
    if not path.is_file():
        raise refuse(
            "", f"the catalog file {relative} is missing beside the package; reinstall workbench"
        )
    text = path.read_text(encoding="utf-8")
    return yaml_files.parse_catalog(text, where=relative)


def read_data_folder(relative: str) -> dict[str, Any]:
    """The content of every YAML file of one catalog folder, by its name without the ending.

    Raises `PlanError` as `read_data_file` does.
    """
    names = sorted(path.stem for path in (assets() / relative).glob("*.yaml"))
    return {name: read_data_file(f"{relative}/{name}.yaml") for name in names}
