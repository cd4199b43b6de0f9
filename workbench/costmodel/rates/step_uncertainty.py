"""How far a step time may be off: one interval, learnt from sites that no constant had seen.

Its width follows from what is known of a plan before it runs: whether its framework was measured
at all, how much of the step waits for networks or hosts, and how far the plan is from everything
measured. A row of the user's own machine and framework makes it narrower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench.costmodel.rates.fitted_constants import fitted_document, measured_profile


@dataclass(frozen=True)
class StepSituation:
    """What the width of an interval depends on."""

    unknown_framework: bool
    """Whether the framework was measured at no site."""
    waiting: float
    """Share of the step in which the busiest GPU waits for a network, a stage or its host."""
    octaves: float
    """Distance to the nearest measured step, in doublings (`planner/published_steps.py`)."""
    after_own_row: bool = False
    """Whether a row of the same machine and framework has calibrated the estimate."""


@dataclass(frozen=True)
class StepUncertainty:
    """Half-widths of the 90 % interval of the logarithm of a step time, by cause; causes add up by
    their squares.
    """

    base: float
    unknown_framework: float
    waiting: float
    """Of a step that waits all the time."""
    octave: float
    """Of each doubling between a plan and the nearest measured step."""

    def half_width(self, at: StepSituation) -> float:
        """Half-width of the interval of the logarithm. A row of one's own framework and machine
        leaves neither unknown, nor far.
        """
        always = math.hypot(self.base, self.waiting * at.waiting)
        far = (self.unknown_framework * at.unknown_framework, self.octave * at.octaves)
        return always if at.after_own_row else math.hypot(always, *far)

    def interval(self, at: StepSituation) -> tuple[float, float]:
        """(low, high) multiples of the estimate that hold nine of ten step times."""
        half = self.half_width(at)
        return math.exp(-half), math.exp(half)


UNFITTED = StepUncertainty(0.7, 0.0, 0.0, 0.0)
"""Before anything was fitted: half to twice the estimate."""


@lru_cache(maxsize=64)
def step_uncertainty(without: str | None = None) -> StepUncertainty:
    """The published one; that of the fit `without` a site, where the fit has rows of it."""
    found = _part(without).get("uncertainty")
    return StepUncertainty(**found) if found else UNFITTED


def is_well_known(stack: str, without: str | None = None) -> bool:
    """Whether a framework profile was measured at three sites or more."""
    return measured_profile(stack) in _part(without).get("well_known", ())


def _part(without: str | None) -> Mapping[str, Any]:
    document = fitted_document()
    found: Mapping[str, Any] = document.get("without", {}).get(without, document)
    return found
