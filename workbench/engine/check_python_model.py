"""`python -m workbench.engine.check_python_model PLAN --allow-code`: hold a plan's operators
against the model that is code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.engine.exit_codes import status
from workbench.models.python_model import build_python_model
from workbench.parallel.operators.module_sites import operator_placements
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan


def inspect(plan: Plan, allow_code: bool) -> None:
    """Raises `PlanError` where a plan's code is not allowed, is no model, or has not what the
    operators name.
    """
    full = plan.resolve()
    require(full, "run", allow_code)
    if full.code:
        operator_placements(build_python_model(full.code, full.training.seed), full)


def main() -> int:
    """0, or 2 with what stands against the plan on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.check_python_model")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--allow-code", action="store_true")
    arguments = parser.parse_args()
    return status(lambda: inspect(Plan.load(arguments.plan), arguments.allow_code))


if __name__ == "__main__":
    sys.exit(main())
