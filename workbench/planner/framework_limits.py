"""What a framework cannot do: conditions on plans, each with the document that says so, from
`cannot` of its profile in `data/frameworks/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.plan_conditions import Condition, parse_condition

LIMITED_FIELDS = (
    "strategy.pipeline.size",
    "strategy.pipeline.schedule",
    "strategy.data.zero",
    "strategy.tensor.size",
    "strategy.tensor.algorithm",
    "strategy.tensor.sequence",
    "strategy.context.size",
    "strategy.expert.size",
)
"""Fields that a limit may name."""


@dataclass(frozen=True)
class FrameworkLimit:
    """One thing that a framework profile cannot do."""

    stack: str
    what: str
    when: tuple[Condition, ...]
    """It cannot where all of them hold."""
    source: str

    def __str__(self) -> str:
        return f"{self.stack} has no {self.what} ({self.source})"


@lru_cache(maxsize=64)
def framework_limits(stack: str) -> tuple[FrameworkLimit, ...]:
    """What a framework profile cannot do; that of the profile it is like, too."""
    return tuple(
        FrameworkLimit(
            stack,
            said["what"],
            tuple(parse_condition(text, LIMITED_FIELDS) for text in said["when"]),
            said["source"],
        )
        for said in _entries(stack).values()
    )


def broken_limits(plan: ResolvedPlan) -> list[str]:
    """What the plan asks of its framework that it cannot do, in words; empty where nothing."""
    return [
        str(limit)
        for limit in framework_limits(plan.strategy.stack)
        if all(c.holds_for(_value(plan, c.field)) for c in limit.when)
    ]


def stays_possible(plan: ResolvedPlan, changed: ResolvedPlan) -> bool:
    """Whether a change asks nothing new of the framework that it cannot do."""
    return set(broken_limits(changed)) <= set(broken_limits(plan))


def _entries(stack: str) -> dict[str, Any]:
    entry = framework_table()[stack]
    inherited = _entries(entry["like"]) if "like" in entry else {}
    return {**inherited, **entry.get("cannot", {})}


def _value(plan: ResolvedPlan, field: str) -> Any:
    return reduce(getattr, field.split("."), plan)
