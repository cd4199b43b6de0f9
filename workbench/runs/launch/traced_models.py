"""Tracing a user's module in a child process, once for all plans that run it alike."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from workbench.plan.operators.traced.traced_json import TracedModel, model_from_json
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import Verb, require
from workbench.plan.schema import Plan
from workbench.planner.operator_plans.traced_plan import TORCH_NAMES
from workbench.runs.launch import child_process
from workbench.safe_io.files import file_states

MOST = 8
"""Traces that are kept."""
_kept: dict[str, dict[str, Any]] = {}


def traced_model(
    plan: Plan, allow_code: bool = False, sequences: int | None = None, verb: Verb = "estimate"
) -> TracedModel:
    """Trace the Python model of `plan` in a child process.

    A trace is used again for any strategy, as long as the files that the module's code read are
    what they were.

    Args:
        plan: Its model is code.
        allow_code: Whether that code may run.
        sequences: Of the microbatch that it is traced at; None: the plan's micro-batch.
        verb: What the plan must be legal for.

    Raises:
        PlanError: The code is not allowed, or the plan asks for what `verb` does not support.
        ValueError: It cannot be traced.
    """
    full = plan.resolve()
    require(full, verb, allow_code)
    count = full.training.micro_batch if sequences is None else sequences
    key = _what_it_reads(full, count)
    answer = _kept.get(key)
    if answer is None or answer["files"] != file_states(answer["files"]):
        _kept[key] = answer = _traced(full, count, verb)
        while len(_kept) > MOST:
            _kept.pop(next(iter(_kept)))
    return model_from_json(answer["model"])


def _what_it_reads(plan: ResolvedPlan, sequences: int) -> str:
    """What of a plan, and of this process, a trace depends on."""
    assert plan.code is not None
    training, precision = plan.training, plan.strategy.precision
    shape = [sequences, training.sequence_length, plan.vocab, training.seed]
    code = [plan.code.python, plan.code.args, os.getcwd(), sys.path]
    return json.dumps([shape, TORCH_NAMES[precision], code])


def _traced(plan: ResolvedPlan, sequences: int, verb: Verb) -> dict[str, Any]:
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.yaml")
        path.write_text(plan.to_yaml(), encoding="utf-8")
        child_process.python(
            "workbench.engine.python_model.trace_graph",
            [str(path), "--sequences", str(sequences), "--verb", verb, "--allow-code"],
            lines.append,
        )
    return dict(json.loads(lines[-1]))
