"""Trace a plan's Python model, and print its graph as JSON.

`python -m workbench.engine.python_model.trace_graph PLAN --allow-code`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch

from workbench.engine.exit_codes import exit_status
from workbench.engine.precision import plan_dtypes
from workbench.engine.python_model.user_files import user_files
from workbench.models.python_model import build_python_model, returns_loss
from workbench.models.traced.export_trace import trace_module
from workbench.parallel.operators.traced_module import checked_graph
from workbench.plan.operators.traced.traced_json import TracedModel, model_to_json
from workbench.plan.rules.supported import Verb, require
from workbench.plan.schema import Plan


def trace_graph(
    plan: Plan, allow_code: bool, sequences: int | None = None, verb: Verb = "estimate"
) -> TracedModel:
    """The graph of a plan's Python model. How the plan shards it does not matter.

    Args:
        plan: Its model is code.
        allow_code: Whether that code may run.
        sequences: Of the microbatch that it is traced at; None: the plan's micro-batch.
        verb: What the plan must be legal for.

    Raises:
        PlanError: The code is not allowed, or the plan not legal for `verb`; the code builds no
            model, cannot be traced, or would not train alike on every mesh.
    """
    full = plan.resolve()
    require(full, verb, allow_code)
    assert full.code is not None
    dtype, length = plan_dtypes(full)[0], full.training.sequence_length
    with torch.device("meta"):  # a graph has no values
        model = build_python_model(full.code, full.training.seed).train()
    count = full.training.micro_batch if sequences is None else sequences
    graph, _ = trace_module(model, count, length, dtype, returns_loss(model))
    graph = checked_graph(graph, model, full, dtype).graph
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    sizes = [
        b.numel() * (dtype.itemsize if b.is_floating_point() else b.element_size())
        for b in model.buffers()
    ]
    return TracedModel(graph, shapes, sum(sizes))


def _answer(given: argparse.Namespace) -> dict[str, Any]:
    """The model as plain data, and the files that its code has read."""
    plan = Plan.load(given.plan)
    with user_files() as files:
        model = trace_graph(plan, given.allow_code, given.sequences, given.verb)
    return {"model": model_to_json(model), "files": files}


def main() -> int:
    """One JSON document; exit code 2 with the problems on stderr."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.python_model.trace_graph")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--verb", choices=get_args(Verb), default="estimate")
    parser.add_argument("--allow-code", action="store_true")
    given = parser.parse_args()
    return exit_status(lambda: print(json.dumps(_answer(given))))


if __name__ == "__main__":
    sys.exit(main())
