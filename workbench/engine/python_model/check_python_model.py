"""Check that a plan's operator strategies name modules of its Python model.

`python -m workbench.engine.python_model.check_python_model PLAN --allow-code`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import plan_dtypes
from workbench.models.python_model import build_python_model
from workbench.parallel.operators.traced_module import trace_for_plan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan


def check_python_model(plan: Plan, allow_code: bool) -> None:
    """Build the plan's Python model, and find the modules that its operator strategies name.

    Raises:
        PlanError: The code is not allowed, builds no model, or lacks a module.
    """
    full = plan.resolve()
    require(full, "run", allow_code)
    if full.code:
        model = build_python_model(full.code, full.training.seed)
        trace_for_plan(model, full, plan_dtypes(full)[0])


def main() -> int:
    """Exit code 0, or 2 with the problems on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.engine.python_model.check_python_model"
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--allow-code", action="store_true")
    arguments = parser.parse_args()
    return exit_status(lambda: check_python_model(Plan.load(arguments.plan), arguments.allow_code))


if __name__ == "__main__":
    sys.exit(main())
