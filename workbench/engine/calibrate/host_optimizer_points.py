"""A measured point of the optimizer's step in host memory, as offload takes it: AdamW of fp32
states by 16-bit gradients, bucket by bucket, and its rounding to 16 bits (ZeRO-Offload,
2101.06840).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.engine.calibrate.local_points import Point
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.parallel.layout import Layout
from workbench.plan.schema import Optimizer
from workbench.runtime_facts.offload_sizes import STAGING_BYTES, stepped_bytes


def host_optimizer_points(survey: CalibrationSurvey) -> Iterator[Point]:
    """One step of the survey's buckets, on as many threads as the rank has."""
    states, staged = _States(survey.stepped), torch.zeros(STAGING_BYTES // 2, dtype=torch.bfloat16)
    layouts = {name: Layout.unsharded(name, x.shape) for name, x in states.masters.items()}
    parameters = {name: x.bfloat16() for name, x in states.masters.items()}
    optimizer = MixedPrecisionOptimizer(
        parameters, states.gradients, layouts, Optimizer(), 1, host=states
    )

    def round_bucket(index: int) -> None:
        for piece in states.masters[str(index)].split(staged.numel()):
            staged[: piece.numel()].copy_(piece)

    numel = sum(survey.stepped)
    each = stepped_bytes(gradient=2, moments=4 + 4, target=4, parameter=2)
    labels = {"parameters": numel, "bytes": numel * each}
    yield Point(
        "host_optimizer", labels, lambda: optimizer.step(0, on_stepped=round_bucket), "cores"
    )


@dataclass
class _States:
    """Buckets of one tensor each."""

    numels: tuple[int, ...]
    masters: dict[str, Tensor] = field(init=False)
    gradients: dict[str, Tensor] = field(init=False)
    names: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        # Not zeros: moments would decay to denormal numbers.
        self.masters = {str(i): torch.rand(n) for i, n in enumerate(self.numels)}
        self.gradients = {str(i): torch.rand(n).bfloat16() for i, n in enumerate(self.numels)}
        self.names = [[str(i)] for i in range(len(self.numels))]
