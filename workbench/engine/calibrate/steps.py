"""Steps of a model so small that only the host works: what a step, a microbatch and a layer cost beside arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from workbench.engine.calibrate.points import Point
from workbench.engine.calibrate.survey import Survey
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan
from workbench.plan.source import build

WIDTH, TOKENS, VOCAB = 16, 4, 256


def steps(survey: Survey, device: torch.device) -> Iterator[Point]:
    """Every combination of layers and microbatches, on this rank alone."""
    for layers, microbatches in itertools.product(survey.layers, survey.microbatches):
        labels = {"layers": layers, "microbatches": microbatches}
        yield Point("steps", labels, _step(_tiny(layers, microbatches, device.type), device), "host")


def _tiny(layers: int, microbatches: int, device: str) -> Plan:
    """A complete plan of one rank; its card's figures are never used."""
    figures = dict.fromkeys(("memory_gib", "bandwidth_gbs", "link_gbs", "pcie_gbs"), 1.0)
    card = {"name": "any", "device": device, "tflops": {"fp32": 1.0}, **figures}
    shape = {"layers": layers, "hidden": WIDTH, "heads": 2, "ffn": 2 * WIDTH, "vocab": VOCAB}
    batch = {"sequence_length": TOKENS, "global_batch": microbatches, "micro_batch": 1}
    cluster = {"gpu": card, "gpus": 1}
    return build({"model": shape, "cluster": cluster, "strategy": {"precision": "fp32"}, "training": batch}).complete()


def _step(plan: Plan, device: torch.device) -> Callable[[], object]:
    session = Session.build(plan, build_mesh(plan.sizes, plan.strategy.placement, 0, device.type), device)
    tokens = torch.zeros(plan.num_microbatches, 1, TOKENS, dtype=torch.long, device=device)
    return lambda: session.step(0, tokens, tokens)
