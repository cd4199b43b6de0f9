"""What was published near a plan: the highest MFU on its GPU at its scale, and the nearest measured
step.

An estimate far from everything that was ever measured is an extrapolation, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.machine import gpu_catalog
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan

NEAR_SCALE = 4.0
"""Factor by which the number of GPUs may differ for a step to count as near a plan's scale."""
FAR_OCTAVES = 1.5
"""Doublings beyond which a size is far from the nearest measured one."""
OTHER_GPU, OTHER_GENERATION, OTHER_FRAMEWORK = 1.0, 3.0, 1.0
"""Distances, in doublings of a size, of another GPU, another generation and another framework."""


@dataclass(frozen=True)
class MeasuredStep:
    """One published configuration, the fastest of those that are alike."""

    gpu: str
    gpus: int
    parameters: float
    """Active parameters."""
    sequence: int
    """Tokens of a sequence."""
    framework: str
    precision: str
    mfu: float
    """Model FLOPs utilization at the peak of its precision."""
    row: str
    """Identifier in `data/validation/published.csv.gz`."""

    def to_list(self) -> list[Any]:
        """As `data/fitted.json` holds it."""
        return list(astuple(self))


@lru_cache(maxsize=1)
def measured_steps() -> tuple[MeasuredStep, ...]:
    """Every clean published configuration."""
    return tuple(MeasuredStep(*entry) for entry in fitted_document().get("measured", ()))


def published_beside(plan: ResolvedPlan, framework: str) -> dict[str, Any]:
    """What was published near a plan; empty where nothing is known of its kind of device.

    Args:
        plan: The plan, whose model is a shape.
        framework: Framework profile whose versions were measured together.

    Returns:
        `highest_mfu` and `highest_mfu_of` (null where nothing ran on that GPU near that scale),
        `nearest` and `extrapolates` (what the nearest measured step is far in; null where nothing).
    """
    if plan.gpu.device == "cpu" or plan.code:
        return {}
    steps = measured_steps()
    if not steps:
        return {}
    size = float(parameters(plan.shape).active)
    highest = highest_mfu(steps, plan.gpu.name, plan.world_size, plan.strategy.precision)
    nearest = min(steps, key=lambda step: sum(_distances(step, plan, size, framework).values()))
    far = ", ".join(_far_words(nearest, plan, size, framework))
    return {
        "highest_mfu": highest.mfu if highest else None,
        "highest_mfu_of": _step_words(highest) if highest else None,
        "nearest": _step_words(nearest),
        "extrapolates": far or None,
    }


def highest_mfu(
    steps: Sequence[MeasuredStep], gpu: str, gpus: int, precision: str
) -> MeasuredStep | None:
    """The highest published MFU on a GPU in a precision, within `NEAR_SCALE` of so many GPUs."""
    near = [
        step
        for step in steps
        if (step.gpu, step.precision) == (gpu, precision)
        and 1 / NEAR_SCALE <= step.gpus / gpus <= NEAR_SCALE
    ]
    return max(near, key=lambda step: step.mfu, default=None)


def _step_words(step: MeasuredStep) -> str:
    return (
        f"{step.framework}, {step.parameters / 1e9:.3g} B parameters on {step.gpus} {step.gpu}, "
        f"sequence {step.sequence}, {step.precision} ({step.row})"
    )


def _distances(
    step: MeasuredStep, plan: ResolvedPlan, size: float, framework: str
) -> dict[str, float]:
    """Doublings between a measured step and a plan, by what differs."""
    return {
        "GPUs": abs(math.log2(step.gpus / plan.world_size)),
        "parameters": abs(math.log2(step.parameters / size)),
        "sequence": 0.5 * abs(math.log2(step.sequence / plan.training.sequence_length)),
        "GPU": _gpu_distance(step.gpu, plan.gpu.name),
        "framework": OTHER_FRAMEWORK * (step.framework != framework),
    }


@lru_cache(maxsize=4096)
def _gpu_distance(one: str, other: str) -> float:
    if one == other:
        return 0.0
    known = gpu_catalog.gpus()
    generations = {known[name].gpu.architecture for name in (one, other) if name in known}
    return OTHER_GPU if len(generations) == 1 else OTHER_GENERATION


def _far_words(
    step: MeasuredStep, plan: ResolvedPlan, size: float, framework: str
) -> Iterator[str]:
    """What a plan is far in from the nearest measured step."""
    sizes = {
        "GPUs": (plan.world_size, step.gpus),
        "parameters": (size, step.parameters),
        "tokens of a sequence": (plan.training.sequence_length, step.sequence),
    }
    for what, (asked, seen) in sizes.items():
        if abs(math.log2(asked / seen)) > FAR_OCTAVES:
            yield f"{asked / seen:.2g} times its {what}"
    if step.gpu != plan.gpu.name:
        yield f"{plan.gpu.name} instead of its GPU"
    if step.framework != framework:
        yield f"{framework} instead of its framework"
