"""Trace a plan's Python model as the plan runs it, and print its graph as JSON.

`python -m workbench.engine.python_model.trace_graph PLAN --allow-code`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import plan_dtypes
from workbench.models.python_model import build_python_model, returns_loss
from workbench.models.traced.export_trace import trace_module
from workbench.parallel.operators.traced_module import trace_for_plan
from workbench.plan.operators.traced.traced_json import TracedModel, model_to_json
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan


def trace_graph(plan: Plan, allow_code: bool) -> TracedModel:
    """The graph of a plan's Python model, at the shape of a microbatch.

    Args:
        plan: Its model is code.
        allow_code: Whether that code may run.

    Raises:
        PlanError: The code is not allowed, builds no model, cannot be traced, or a strategy is not
            legal for it.
    """
    full = plan.resolve()
    require(full, "estimate", allow_code)
    assert full.code is not None
    dtype = plan_dtypes(full)[0]
    with torch.device("meta"):  # a graph has no values
        model = build_python_model(full.code, full.training.seed)
    traced = trace_for_plan(model, full, dtype)
    if traced is None:  # it runs as it is, which its graph says as well
        size, length = full.training.micro_batch, full.training.sequence_length
        graph, _ = trace_module(model.train(), size, length, dtype, returns_loss(model))
    else:
        graph = traced.factored.graph
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    sizes = [
        b.numel() * (dtype.itemsize if b.is_floating_point() else b.element_size())
        for b in model.buffers()
    ]
    return TracedModel(graph, shapes, sum(sizes))


def main() -> int:
    """One JSON document; exit code 2 with the problems on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.python_model.trace_graph")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--allow-code", action="store_true")
    given = parser.parse_args()
    return exit_status(
        lambda: print(
            json.dumps(model_to_json(trace_graph(Plan.load(given.plan), given.allow_code)))
        )
    )


if __name__ == "__main__":
    sys.exit(main())
