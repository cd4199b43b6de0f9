"""Shell completion: names of the catalog, plan files and runs that begin as what is typed.

A shell completes files where nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PLAN_SUFFIXES = (".yaml", ".yml")


def models(incomplete: str) -> list[str]:
    """Models of the catalog."""
    from workbench.plan.catalog import catalog

    return _beginning(incomplete, catalog.models())


def gpus(incomplete: str) -> list[str]:
    """GPUs of the catalog, and `local`."""
    from workbench.machine import gpu_catalog

    return _beginning(incomplete, ["local", *gpu_catalog.gpus()])


def strategies(incomplete: str) -> list[str]:
    """Presets."""
    from workbench.plan.catalog import catalog

    return _beginning(incomplete, catalog.strategies())


def plan_files(incomplete: str) -> list[str]:
    """YAML files of the folder that is typed."""
    folder = "".join(incomplete.rpartition("/")[:2])
    try:
        names = sorted(path.name for path in Path(folder or ".").iterdir())
    except OSError:
        return []
    files = (f"{folder}{name}" for name in names if name.endswith(PLAN_SUFFIXES))
    return _beginning(incomplete, files)


def runs(incomplete: str) -> list[str]:
    """Runs of the folder of runs, latest first."""
    from workbench.runs.run import list_runs

    return _beginning(incomplete, (run.id for run in list_runs()))


def plans_and_runs(incomplete: str) -> list[str]:
    """Plan files, and runs."""
    return [*plan_files(incomplete), *runs(incomplete)]


def models_and_plans(incomplete: str) -> list[str]:
    """Models of the catalog, and plan files."""
    return [*models(incomplete), *plan_files(incomplete)]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
