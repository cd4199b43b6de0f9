"""Trace a plan's Python model, and print its operators as JSON.

`python -m workbench.engine.python_model.trace_operators PLAN --sequences N --allow-code`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import plan_dtypes
from workbench.models.python_model import build_python_model, returns_loss
from workbench.models.traced.export_trace import trace_module
from workbench.plan.operators.graph_json import graph_to_json
from workbench.plan.operators.traced.graph_placement import unruled
from workbench.plan.operators.traced.node_factors import factor_graph
from workbench.plan.operators.traced.traced_operators import traced_operators
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan


def trace_operators(plan: Plan, sequences: int, allow_code: bool) -> dict[str, Any]:
    """The operators of a plan's Python model, as plain data.

    Args:
        plan: Its model is code.
        sequences: Of the microbatch that it is traced at.
        allow_code: Whether that code may run.

    Returns:
        `graph`, and `unsharded`: what is said of operators without a rule.

    Raises:
        PlanError: The code is not allowed, builds no model, or cannot be traced.
    """
    full = plan.resolve()
    require(full, "run", allow_code)
    assert full.code is not None
    with torch.device("meta"):  # a graph has no values
        model = build_python_model(full.code, full.training.seed).train()
    length, dtype = full.training.sequence_length, plan_dtypes(full)[0]
    graph, _ = trace_module(model, sequences, length, dtype, returns_loss(model))
    factored = factor_graph(graph)
    return {"graph": graph_to_json(traced_operators(factored)), "unsharded": [*unruled(factored)]}


def main() -> int:
    """One JSON document; exit code 2 with the problems on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.python_model.trace_operators")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--allow-code", action="store_true")
    given = parser.parse_args()
    return exit_status(
        lambda: print(
            json.dumps(trace_operators(Plan.load(given.plan), given.sequences, given.allow_code))
        )
    )


if __name__ == "__main__":
    sys.exit(main())
