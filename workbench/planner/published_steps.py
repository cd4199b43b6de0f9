"""What was published near a plan: the highest MFU on its GPU at its scale, and the nearest measured
step.

An estimate far from everything that was ever measured is an extrapolation, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan

NEAR_SCALE = 4.0
"""Factor by which GPUs and active parameters may differ for a step to be near a plan's scale."""
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
    site: str
    """Where it was measured."""

    def to_list(self) -> list[Any]:
        """As `data/fitted.json` holds it."""
        return list(astuple(self))


@lru_cache(maxsize=1)
def measured_steps() -> tuple[MeasuredStep, ...]:
    """Every clean published configuration."""
    return tuple(MeasuredStep(*entry) for entry in fitted_document().get("measured", ()))


def published_beside(plan: ResolvedPlan, framework: str, gpus: int | None = None) -> dict[str, Any]:
    """What was published near a plan; empty where nothing is known of its kind of device.

    Args:
        plan: The plan, whose model is a shape.
        framework: Framework profile whose versions were measured together.
        gpus: Their number, where it is not the plan's.

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
    world = gpus or plan.world_size
    highest = highest_mfu(steps, published_gpu(plan.gpu), world, size, plan.strategy.precision)
    nearest = steps[int(published_table().distances(plan, framework, world).argmin())]
    far = ", ".join(_far_words(nearest, plan, size, framework, world))
    return {
        "highest_mfu": highest.mfu if highest else None,
        "highest_mfu_of": _step_words(highest) if highest else None,
        "nearest": _step_words(nearest),
        "extrapolates": far or None,
    }


def published_gpu(gpu: GPU) -> str:
    """The name under which steps of a GPU were published; "" where its figures are not those that
    the catalog has under its name.

    Memory may differ: the driver's own reading stands for an attached GPU's, and parts are sold
    with several sizes.
    """
    entry = gpu_catalog.gpus().get(gpu.name)
    return gpu.name if entry and _speeds(entry.gpu) == _speeds(gpu) else ""


def _speeds(gpu: GPU) -> dict[str, Any]:
    return gpu.model_dump(exclude=NOT_SPEED)


NO_PUBLISHED_RUN = "no published run of this framework"
NOT_SPEED = {"title", "memory_gib", "price_per_hour", "price_source", "source"}
"""Fields of a GPU that no step time depends on."""


def highest_mfu(
    steps: Sequence[MeasuredStep], gpu: str, gpus: int, size: float, precision: str
) -> MeasuredStep | None:
    """The highest published MFU on a GPU in a precision, within `NEAR_SCALE` of so many GPUs and
    active parameters.
    """
    near = [
        step
        for step in steps
        if (step.gpu, step.precision) == (gpu, precision)
        and 1 / NEAR_SCALE <= step.gpus / gpus <= NEAR_SCALE
        and 1 / NEAR_SCALE <= step.parameters / size <= NEAR_SCALE
    ]
    return max(near, key=lambda step: step.mfu, default=None)


def _step_words(step: MeasuredStep) -> str:
    return (
        f"{step.framework}, {step.parameters / 1e9:.3g} B parameters on {step.gpus} {step.gpu}, "
        f"sequence {step.sequence}, {step.precision} ({step.row})"
    )


@dataclass(frozen=True)
class StepTable:
    """Measured steps as arrays, so that a plan is compared with all at once."""

    steps: tuple[MeasuredStep, ...]

    @cached_property
    def _sizes(self) -> NDArray[np.float64]:
        """log2 of GPUs, parameters and half that of the sequence, `[3, steps]`."""
        columns = zip(*((s.gpus, s.parameters, s.sequence) for s in self.steps))
        logs: NDArray[np.float64] = np.log2(np.array(list(columns), dtype=float)) * _SIZE_WEIGHTS
        return logs

    @cached_property
    def sites(self) -> NDArray[np.str_]:
        """Site of each step."""
        return np.array([step.site for step in self.steps])

    @cached_property
    def frameworks(self) -> NDArray[np.str_]:
        """Framework profile of each step."""
        return np.array([step.framework for step in self.steps])

    @cached_property
    def _by_gpu(self) -> dict[tuple[str, str], NDArray[np.float64]]:
        """Distances in GPU of those that were asked for, by name and generation, `[steps]`."""
        return {}

    def _gpu_distances(self, gpu: tuple[str, str]) -> NDArray[np.float64]:
        if gpu not in self._by_gpu:
            each = [_gpu_distance(step.gpu, *gpu) for step in self.steps]
            self._by_gpu[gpu] = np.array(each)
        return self._by_gpu[gpu]

    def distances(
        self, plan: ResolvedPlan, framework: str, gpus: int | None = None
    ) -> NDArray[np.float64]:
        """Doublings between a plan, whose model is a shape, and each step: over sizes, GPU and
        framework; `gpus` where their number is not the plan's.
        """
        world = gpus or plan.world_size
        size = float(parameters(plan.shape).active)
        sizes = np.array([[world], [size], [plan.training.sequence_length]], dtype=float)
        own = np.log2(sizes) * _SIZE_WEIGHTS
        apart: NDArray[np.float64] = (
            np.abs(self._sizes - own).sum(axis=0)
            + self._gpu_distances((published_gpu(plan.gpu), plan.gpu.architecture))
            + OTHER_FRAMEWORK * (self.frameworks != framework)
        )
        return apart


_SIZE_WEIGHTS = np.array([[1.0], [1.0], [0.5]])


@lru_cache(maxsize=1)
def published_table() -> StepTable:
    """Every clean published configuration."""
    return StepTable(measured_steps())


@lru_cache(maxsize=1)
def _sites_by_framework() -> dict[str, frozenset[str]]:
    """Where steps of each framework profile were measured."""
    steps = measured_steps()
    frameworks = {step.framework for step in steps}
    return {
        name: frozenset(step.site for step in steps if step.framework == name)
        for name in frameworks
    }


def is_measured(framework: str, without: str | None = None) -> bool:
    """Whether a step of a framework profile, its versions together, was measured anywhere.

    Args:
        framework: Framework profile whose versions were measured together.
        without: A site whose steps do not count.
    """
    return bool(_sites_by_framework().get(framework, frozenset()) - {without})


def octaves_to_measured(plan: ResolvedPlan, framework: str, without: str | None = None) -> float:
    """Doublings by which a plan is further than `FAR_OCTAVES` from the nearest measured step; 0
    where none is known.

    Args:
        plan: The plan, whose model is a shape.
        framework: Framework profile whose versions were measured together.
        without: A site whose steps do not count.
    """
    table = published_table()
    if not table.steps:
        return 0.0
    nearest = table.distances(plan, framework)[table.sites != (without or "")].min()
    return max(0.0, float(nearest) - FAR_OCTAVES)


@lru_cache(maxsize=4096)
def _gpu_distance(measured: str, gpu: str, generation: str) -> float:
    """From a GPU of the catalog to another; one that names no generation is of another one."""
    if measured == gpu:
        return 0.0
    known = gpu_catalog.gpus()
    same = measured in known and known[measured].gpu.architecture == generation
    return OTHER_GPU if same else OTHER_GENERATION


def beyond_published(published: Mapping[str, Any], mfu: float) -> str:
    """What is to be said where a promise of `mfu` is above everything published near it; else
    nothing.
    """
    highest = published.get("highest_mfu")
    if highest is None or mfu <= highest:
        return ""
    return f"{mfu:.1%} MFU is above the best published near this scale, {highest:.1%}"


def _far_words(
    step: MeasuredStep, plan: ResolvedPlan, size: float, framework: str, gpus: int
) -> Iterator[str]:
    """What a plan on so many GPUs is far in from the nearest measured step."""
    sizes = {
        "GPUs": (gpus, step.gpus),
        "parameters": (size, step.parameters),
        "tokens of a sequence": (plan.training.sequence_length, step.sequence),
    }
    for what, (asked, seen) in sizes.items():
        if abs(math.log2(asked / seen)) > FAR_OCTAVES:
            yield f"{asked / seen:.2g} times its {what}"
    if step.gpu != published_gpu(plan.gpu):
        other = " of other figures" if step.gpu == plan.gpu.name else ""
        yield f"{plan.gpu.name}{other} instead of its GPU"
    if step.precision != plan.strategy.precision:
        yield f"{plan.strategy.precision} instead of its {step.precision}"
    if step.framework != framework:
        measured = is_measured(framework)
        yield f"{framework} instead of its framework" if measured else NO_PUBLISHED_RUN
