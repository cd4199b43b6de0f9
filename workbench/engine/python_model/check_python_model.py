"""Check that a plan's Python model can run: that operator strategies name modules of it, and that
its loss is a sum.

`python -m workbench.engine.python_model.check_python_model PLAN --allow-code`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import plan_dtypes
from workbench.errors import refuse
from workbench.models.python_model import build_python_model, returns_loss
from workbench.parallel.operators.traced_module import trace_for_plan
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan

SHORT = 16
"""Tokens of a sequence on which a loss is looked at: on a CPU, of a model of any size."""


def check_python_model(plan: Plan, allow_code: bool) -> None:
    """Build the plan's Python model, and find the modules that its operator strategies name.

    Raises:
        PlanError: The code is not allowed, builds no model, lacks a module, or its loss is a mean.
    """
    full = plan.resolve()
    require(full, "run", allow_code)
    if full.code:
        model = build_python_model(full.code, full.training.seed)
        trace_for_plan(model, full, plan_dtypes(full)[0])
        if returns_loss(model):
            _refuse_mean(model, full)


def _refuse_mean(model: nn.Module, plan: ResolvedPlan) -> None:
    """Refuse a loss that is a mean, which would be divided by the number of tokens twice."""
    length = min(plan.training.sequence_length, SHORT)
    text = torch.randint(
        plan.vocab, (2, length + 1), generator=torch.Generator().manual_seed(plan.training.seed)
    )
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model.eval()
    with torch.no_grad():
        try:
            both, first, second = (
                float(model(tokens[rows], targets[rows])) for rows in ([0, 1], [0], [1])
            )
        except Exception:  # a user's forward may raise any, or ask for other lengths: a run says so
            return
    total = first + second
    if abs(both - total / 2) < abs(both - total):
        what = (
            f"its forward returns a loss that is a mean: {both:.4g} of two sequences, of each "
            f"{first:.4g} and {second:.4g}; legal: the loss summed over tokens, as "
            "cross_entropy(.., reduction='sum') does"
        )
        raise refuse("model.python", what)


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
