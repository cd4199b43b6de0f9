"""The fastest choice of every stage within its memory: which strategies, and how many of its layers
are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.planner.search.joint.stage_choices import StageChoice
from workbench.planner.search.joint.stage_division import Costs

Counts = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class StageLimits:
    """What a stage adds to its operators, and how much memory it has."""

    memory: float
    """Bytes of a rank."""
    state: float
    """Bytes of a parameter with its gradient and moments."""
    transfers: float
    """Seconds of a microbatch's activations to the next stage, and of their gradients back."""
    with_replicas: Callable[[Costs, Costs], Costs]
    """(seconds of the operators, parameters of a rank) -> seconds with what replicas exchange."""


@dataclass(frozen=True)
class StageSeconds:
    """Of a stage by `[in flight - 1, layers]`."""

    seconds: Costs
    """Of a microbatch; infinite where no choice fits."""
    choice: Counts
    """Which has them."""
    recomputed: Counts
    """Layers that are recomputed in backward, as few as fit."""


def stage_seconds(
    choices: tuple[StageChoice, ...], num_layers: int, in_flight: int, limits: StageLimits
) -> StageSeconds:
    """The fastest for every number of layers and of microbatches in flight, up to these."""
    found = [_of_choice(one, num_layers, in_flight, limits) for one in choices]
    seconds, recomputed = (np.array([one[i] for one in found]) for i in (0, 1))
    best = seconds.argmin(0)[None]
    at = (np.take_along_axis(one, best, 0)[0] for one in (seconds, recomputed))
    fastest, again = at
    return StageSeconds(fastest, best[0], again.astype(np.intp))


def _of_choice(
    one: StageChoice, num_layers: int, in_flight: int, limits: StageLimits
) -> tuple[Costs, Costs]:
    """(seconds, layers recomputed)."""
    count = np.arange(num_layers + 1, dtype=np.float64)
    flying = np.arange(1, in_flight + 1, dtype=np.float64)[:, None]
    parameters = one.parameters[0] + one.parameters[1] * count
    held = parameters * limits.state + flying * (one.kept[0] + one.kept[1] * count)
    saved = flying * (one.kept[1] - one.kept_again)
    again = np.ceil((held + one.once - limits.memory) / saved)
    again = np.where(held <= limits.memory, 0.0, again)
    operators = one.seconds[0] + one.seconds[1] * count + one.seconds_again * again
    seconds = limits.with_replicas(operators, parameters) + limits.transfers
    legal = (again <= count) & (count > 0)  # a stage has a layer
    return np.where(legal, seconds, np.inf), np.where(legal, again, 0.0)
