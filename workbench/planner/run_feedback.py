"""What finished runs say of an estimate: a few factors that bring it to what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.machine.calibration_file import Scale

ENOUGH = 4
"""Runs that fix three numbers; fewer would be met exactly by numbers that predict nothing."""
TRUST = 0.05
"""Weight of the assumption that compute and communication are off by one common factor: with few
runs they cannot be separated. Relative to a run's own error.
"""


@dataclass(frozen=True)
class StepObservation:
    """One run: its measured step, and what was estimated of it, seconds."""

    measured: float
    compute: float
    """With the bubble and the optimizer."""
    communication: float
    overhead: float

    @property
    def estimated(self) -> float:
        """The whole step."""
        return self.compute + self.communication + self.overhead


def step_observation(measured: float, parts: dict[str, float]) -> StepObservation:
    """A run whose step took `measured` seconds and was estimated as `parts`, see
    `planner.step.parts`.
    """
    communication = sum(value for name, value in parts.items() if name.endswith("_comm"))
    overhead = parts.get("overhead", 0.0)
    return StepObservation(
        measured, sum(parts.values()) - communication - overhead, communication, overhead
    )


def scale(runs: Sequence[StepObservation], before: Scale) -> Scale:
    """Factors that bring estimates made with `before` to the measured steps.

    One run fixes one factor, on compute and communication alike, and is met exactly; `ENOUGH` runs
    fix three numbers, by least squares of relative errors.
    """
    common = float(np.median([_common(run) for run in runs]))
    compute, communication, fixed = (
        _several(runs, common) if len(runs) >= ENOUGH else (common, common, 0.0)
    )
    return Scale(
        compute=before.compute * compute,
        communication=before.communication * communication,
        fixed_ms=before.fixed_ms + fixed * 1e3,
    )


def _common(run: StepObservation) -> float:
    """The factor that one run asks for; overhead is believed unless it alone is more than the
    step.
    """
    work = run.compute + run.communication
    return max(run.measured - run.overhead, 0.05 * run.measured) / work


def _several(runs: Sequence[StepObservation], common: float) -> tuple[float, float, float]:
    from scipy.optimize import nnls

    rows = [(r.compute / r.measured, r.communication / r.measured, 1 / r.measured) for r in runs]
    targets = [1 - r.overhead / r.measured for r in runs]
    prior = [(TRUST, 0.0, 0.0), (0.0, TRUST, 0.0)]
    found = nnls(np.array(rows + prior), np.array([*targets, TRUST * common, TRUST * common]))[0]
    compute, communication = np.maximum(found[:2], 0.05 * common)
    return float(compute), float(communication), float(found[2])


def error(runs: Sequence[StepObservation]) -> float:
    """Mean |estimated / measured - 1|."""
    return float(np.mean([abs(run.estimated / run.measured - 1) for run in runs]))
