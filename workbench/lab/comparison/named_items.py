"""Comparing plans and runs by name, each plan with a rehearsal: what shell and notebook ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.lab.comparison.compare import Comparison, compare
from workbench.lab.comparison.entries import ComparisonEntry
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.runs.launch import subprocess_verbs
from workbench.runs.run import Run, find_run


def compare_named(
    items: Sequence[Any],
    rehearsed: bool = True,
    root: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare items of which some are names; see `workbench.compare`."""
    found = compare(*open_items(items, root))
    if rehearsed:
        for entry in found.entries:
            _rehearse(entry, progress)
    return Comparison(found.entries)


def _rehearse(entry: ComparisonEntry, progress: Callable[[str], None] | None) -> None:
    """Add a rehearsal to an entry whose plan can be rehearsed and has not been."""
    if entry.plan is None or entry.profile_of("rehearsed"):
        return
    full = entry.plan.resolve()
    if unsupported(full, "rehearse"):
        return
    if progress:
        progress(f"rehearsing {entry.name}")
    entry.profiles.append(subprocess_verbs.rehearse(full))


def open_items(items: Sequence[Any], root: str | Path | None = None) -> list[Any]:
    """The items, with the plan or the run in place of each name.

    Raises:
        PlanError: A name is neither a plan file nor a run.
    """
    return [_open(item, root) if isinstance(item, str | Path) else item for item in items]


def _open(name: str | Path, root: str | Path | None) -> Plan | Run:
    if os.path.isfile(name):  # Path.is_file raises for a name that is too long
        plan = Plan.load(name)
        plan.resolve()
        return plan
    if str(name).endswith((".yaml", ".yml")):
        return Plan.load(name)  # says why it cannot be read
    return find_run(name, root)
