"""Measured points of whole training steps.

Tiny models, whose steps are host overhead only, and probe models against which estimates are
checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from workbench.engine.calibrate.local_points import Point
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.probe_plan import probe_plan
from workbench.plan.resolved_plan import ResolvedPlan

TINY = {"hidden": 16, "heads": 2, "ffn": 32, "vocab": 256}


def step_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """Steps of tiny models (layers x microbatches) and of the probes, on this rank alone."""
    for layers, microbatches in itertools.product(survey.layers, survey.microbatches):
        plan = probe_plan(device.type, 4, microbatches, layers=layers, **TINY)
        yield Point(
            "steps", {"layers": layers, "microbatches": microbatches}, _step(plan, device), "host"
        )
    for labels in survey.probes:
        yield Point("probes", dict(labels), _step(probe_plan(device.type, **labels), device))


def _step(plan: ResolvedPlan, device: torch.device) -> Callable[[], object]:
    session = Session.build(plan, build_mesh(plan, 0, device), device)
    t = plan.training
    tokens = (
        torch.arange(t.sequence_length, device=device).expand(plan.num_microbatches, 1, -1)
        % plan.shape.vocab
    )
    return lambda: session.step(0, tokens, tokens)
