"""The plan that a verb was given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.plan.schema import Plan


def given_plan(plan: Plan | str | Path) -> Plan:
    """A plan, loaded where its file is given. Raises `PlanError`."""
    if not isinstance(plan, str | Path):
        return plan
    from workbench.plan.schema import Plan

    return Plan.load(plan)
