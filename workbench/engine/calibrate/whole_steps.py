"""Measured points of whole training steps.

Tiny models, whose steps are host overhead only, and probe models against which estimates are
checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from workbench.engine.calibrate.local_points import Point
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.probe_plan import TINY, TINY_SEQUENCE, probe_plan
from workbench.plan.resolved_plan import ResolvedPlan


def step_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """Steps of tiny models (layers x microbatches, and recomputed) and of the probes, on this rank
    alone.
    """
    most = max(survey.layers), max(survey.microbatches)
    few = min(survey.layers), max(survey.microbatches)
    variants = [(*most, "selective", "eager"), (*most, "full", "eager")]
    if survey.operators:
        variants += [(*few, "none", "compiled"), (*most, "none", "compiled")]
    eager = itertools.product(survey.layers, survey.microbatches, ("none",), ("eager",))
    for layers, microbatches, recompute, kernels in (*eager, *variants):
        plan = probe_plan(
            device.type, TINY_SEQUENCE, microbatches, recompute, kernels, layers=layers, **TINY
        )
        labels: dict[str, Any] = {"layers": layers, "microbatches": microbatches}
        labels |= {"recompute": recompute, "kernels": kernels}
        yield Point("steps", labels, _step(plan, device), "host")
    for probe in survey.probes:
        sizes: dict[str, Any] = dict(probe)
        yield Point("probes", sizes, _step(probe_plan(device.type, **sizes), device))


def _step(plan: ResolvedPlan, device: torch.device) -> Callable[[], object]:
    session = Session.build(plan, build_mesh(plan, 0, device), device)
    t = plan.training
    tokens = (
        torch.arange(t.sequence_length, device=device).expand(plan.num_microbatches, 1, -1)
        % plan.shape.vocab
    )
    return lambda: session.step(0, tokens, tokens)
