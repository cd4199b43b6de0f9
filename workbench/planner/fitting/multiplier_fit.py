"""Multipliers of hardware and frameworks by penalized least squares on the logarithm of step time.

Sites weigh alike, whatever their number of rows, and far rows count by their distance, not its
square. Every multiplier is drawn towards 1 by a prior: frameworks are random effects around 1
(partial pooling).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.rates.fitted_constants import (
    HARDWARE_MULTIPLIERS,
    IN_STEP,
    FittedConstants,
    fitted_constants,
)
from workbench.planner.fitting.fit_rows import FitRow

Array = NDArray[np.float64]
PRIOR_DEVIATIONS = {IN_STEP: 0.15, "traffic": 0.4, "launch": 0.25, "nic": 0.3}
"""Standard deviations of the logarithms of hardware multipliers before any row is seen."""
FRAMEWORK_DEVIATION = 0.08
ROW_DEVIATION = 0.1
"""Relative error beyond which a row counts by its distance, not its square."""
SITE_ROWS = 4.0
"""Independent rows that a site is worth, whatever their number: rows of one site err alike."""
MIN_SITES = 3
"""Sites below which a framework's multiplier goes at most half of its way."""
DERIVATIVE_STEP = 0.02
ROUNDS = 3
MAX_REWEIGHTINGS = 100
CONVERGED = 1e-7


@dataclass(frozen=True)
class Linearization:
    """Logarithms of predicted step times around one point of the fit."""

    point: Array
    predicted: Array
    slopes: Array
    """`[rows, multipliers]`"""

    def at(self, point: Array) -> Array:
        """Logarithms of predicted step times at another point."""
        result: Array = self.predicted + self.slopes @ (point - self.point)
        return result


@dataclass(frozen=True)
class MultiplierFit:
    """The rows of a fit and the names of what is fitted to them."""

    rows: Sequence[FitRow]

    @cached_property
    def frameworks(self) -> list[str]:
        """Frameworks of the rows."""
        return sorted({row.framework for row in self.rows})

    @cached_property
    def names(self) -> list[str]:
        """Names of the multipliers, as in `FittedConstants`."""
        return [IN_STEP, *HARDWARE_MULTIPLIERS, *(f"framework.{name}" for name in self.frameworks)]

    @cached_property
    def measured(self) -> Array:
        """Logarithms of measured step times."""
        return np.log([row.seconds for row in self.rows])

    @cached_property
    def sites(self) -> NDArray[np.object_]:
        """Site of each row."""
        return np.array([row.site for row in self.rows], dtype=object)

    @cached_property
    def framework_of_row(self) -> NDArray[np.object_]:
        """Framework of each row."""
        return np.array([row.framework for row in self.rows], dtype=object)

    @cached_property
    def prior_deviations(self) -> Array:
        """Standard deviation of each multiplier's logarithm before any row is seen."""
        return np.array([_prior_deviation(name) for name in self.names])

    def constants_at(self, point: Array) -> FittedConstants:
        """Fitted constants at a point; versions of a framework share its multiplier."""
        logs = dict(zip(self.names, map(float, point)))
        profiles = {(row.planned.plan.strategy.stack, row.framework) for row in self.rows}
        return fitted_constants(
            logs | {f"framework.{stack}": logs[f"framework.{one}"] for stack, one in profiles}
        )

    def evaluate(self, point: Array) -> Array:
        """Logarithms of predicted step times."""
        fitted = self.constants_at(point)
        return np.log([row.predicted(fitted) for row in self.rows])

    def linearize(self, point: Array) -> Linearization:
        """Predictions and their slopes at a point. All frameworks are moved at once: a row sees
        its own alone.
        """
        base = self.evaluate(point)
        slopes = np.zeros((len(self.rows), len(self.names)))
        first = len(self.names) - len(self.frameworks)
        for column in range(first):
            moved = point.copy()
            moved[column] += DERIVATIVE_STEP
            slopes[:, column] = (self.evaluate(moved) - base) / DERIVATIVE_STEP
        moved = point.copy()
        moved[first:] += DERIVATIVE_STEP
        own = (self.evaluate(moved) - base) / DERIVATIVE_STEP
        for column, name in enumerate(self.frameworks, start=first):
            slopes[:, column] = np.where(self.framework_of_row == name, own, 0.0)
        return Linearization(point, base, slopes)

    def solve(self, near: Linearization, kept: NDArray[np.bool_]) -> Array:
        """The best point for the rows that are kept, by iteratively reweighted least squares."""
        terms, sites = near.slopes[kept], self.sites[kept]
        wanted = self.measured[kept] - near.predicted[kept] + terms @ near.point
        rows_of_site = {name: int((sites == name).sum()) for name in set(sites)}
        weights = np.array([min(1.0, SITE_ROWS / rows_of_site[name]) for name in sites])
        point = near.point
        for _ in range(MAX_REWEIGHTINGS):
            off = (terms @ point - wanted) / ROW_DEVIATION
            pull = weights / np.sqrt(1 + off**2) / ROW_DEVIATION**2
            normal = (terms * pull[:, None]).T @ terms + np.diag(self.prior_deviations**-2)
            found = np.linalg.solve(normal, (terms * pull[:, None]).T @ wanted)
            done = np.abs(found - point).max() < CONVERGED
            point = found
            if done:
                break
        return point

    def capped(self, near: Linearization, point: Array, kept: NDArray[np.bool_]) -> Array:
        """The point with the multipliers of frameworks of few sites no further than half-way from
        1 to what their own rows alone would have; 1 where no row is kept.
        """
        result, first = point.copy(), len(self.names) - len(self.frameworks)
        for column, name in enumerate(self.frameworks, start=first):
            own = kept & (self.framework_of_row == name)
            if not own.any():
                result[column] = 0.0
            elif len(set(self.sites[own])) < MIN_SITES:
                result[column] = self._at_most_half_way(near, point, own, column)
        return result

    def _at_most_half_way(
        self, near: Linearization, point: Array, own: NDArray[np.bool_], column: int
    ) -> float:
        without = point.copy()
        without[column] = 0.0
        left = self.measured[own] - near.at(without)[own]
        medians = [np.median(left[self.sites[own] == site]) for site in set(self.sites[own])]
        most = 0.5 * abs(float(np.mean(medians)))
        return float(np.clip(point[column], -most, most))


def _prior_deviation(name: str) -> float:
    if name.startswith("framework."):
        return FRAMEWORK_DEVIATION
    return PRIOR_DEVIATIONS[name]


def fit_all(fit: MultiplierFit) -> tuple[Linearization, Array]:
    """(predictions around the fit, the fit itself) of all rows."""
    every = np.ones(len(fit.rows), dtype=bool)
    point = np.zeros(len(fit.names))
    for _ in range(ROUNDS):
        near = fit.linearize(point)
        point = fit.solve(near, every)
    near = fit.linearize(point)
    return near, fit.capped(near, point, every)


def fit_without_sites(
    fit: MultiplierFit, near: Linearization, sites: Iterable[str], framework: str | None = None
) -> Array:
    """The fit to the rows of all other sites, and of no such framework."""
    kept: NDArray[np.bool_] = ~np.isin(fit.sites.astype(str), list(sites))
    kept &= fit.framework_of_row != framework
    return fit.capped(near, fit.solve(near, kept), kept)
