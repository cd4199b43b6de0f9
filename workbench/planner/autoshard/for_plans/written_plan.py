"""The plan that runs the strategies that were found."""

from __future__ import annotations

from math import prod
from typing import Any

from workbench.plan.schema import Plan
from workbench.planner.autoshard.choice_result import OperatorPlan


def plan_with(plan: Plan, found: OperatorPlan) -> Plan:
    """`plan` with the strategies and changes of `found`: legal, and as it was priced.

    The ranks of the operators are the tensor axis. What splits operators in other ways, sequence
    parallelism and tensor grids, is turned off. A microbatch of the operators has the sequences
    that all their ranks had before.

    Args:
        plan: As written.
        found: Its operator strategies.
    """
    full = plan.resolve()
    fields: dict[str, Any] = {
        "strategy.operators": found.forms,
        "strategy.tensor.size": prod(found.ranks),
        "strategy.tensor.algorithm": "1d",
        "strategy.tensor.sequence": False,
        "training.micro_batch": found.sequences,
        "training.global_batch": full.training.global_batch,
    }
    return plan.replace(**(fields | found.changes))
