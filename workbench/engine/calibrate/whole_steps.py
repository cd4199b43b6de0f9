"""Measured points of whole training steps.

Tiny models, whose steps are host overhead only, and probe models against which estimates are
checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from workbench.engine.calibrate.local_points import Point
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor
from workbench.plan.probe_plan import TINY, TINY_PRECISION, TINY_SEQUENCE, probe_plan
from workbench.plan.resolved_plan import ResolvedPlan


def step_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """Steps of tiny models (layers x microbatches, and recomputed) and of the probes, on this rank
    alone.
    """
    most = max(survey.layers), max(survey.microbatches)
    few = min(survey.layers), max(survey.microbatches)
    variants = [(*most, "selective", "eager", False), (*most, "full", "eager", False)]
    if survey.operators:
        variants += [(*few, "none", "compiled", False), (*most, "none", "compiled", False)]
        variants += [(*most, "none", "eager", True)]
    if device.type == "cuda":
        variants += [(*few, "none", "fused", False), (*most, "none", "fused", False)]
    precision = TINY_PRECISION.get(device.type, "fp32")
    eager = itertools.product(survey.layers, survey.microbatches, ("none",), ("eager",), (False,))
    for layers, microbatches, recompute, kernels, split in (*eager, *variants):
        sizes: dict[str, Any] = {"layers": layers, "precision": precision, **TINY}
        plan = probe_plan(device.type, TINY_SEQUENCE, microbatches, recompute, kernels, **sizes)
        labels: dict[str, Any] = {"layers": layers, "microbatches": microbatches}
        labels |= {"recompute": recompute, "kernels": kernels, "split": split}
        labels["precision"] = precision
        yield Point("steps", labels, _step(plan, device, split), "host")
    for probe in survey.probes:
        sizes = dict(probe)
        yield Point("probes", sizes, _step(probe_plan(device.type, **sizes), device))


def _step(plan: ResolvedPlan, device: torch.device, split: bool = False) -> Callable[[], object]:
    session = Session.build(plan, build_mesh(plan, 0, device), device)
    if split:
        session.executor = with_split_backward(session.executor)
    t = plan.training
    tokens = (
        torch.arange(t.sequence_length, device=device).expand(plan.num_microbatches, 1, -1)
        % plan.shape.vocab
    )
    return lambda: session.step(0, tokens, tokens)


def with_split_backward(executor: ScheduleExecutor) -> ScheduleExecutor:
    """The same work with every backward split into input and weight gradients, as in zero-bubble
    schedules.
    """
    rows = [
        [action._replace(kind=kind) for action in row for kind in _split(action.kind)]
        for row in executor.table.rows
    ]
    return ScheduleExecutor(
        replace(executor.table, rows=tuple(map(tuple, rows))),
        executor.stages,
        executor.axis,
        executor.empty_boundary,
        executor.hooks,
        unsplit=executor.unsplit,
    )


def _split(kind: str) -> tuple[str, ...]:
    return ("I", "W") if kind == "B" else (kind,)
