"""The interval of step times, learnt from errors on sites and frameworks that no constant has seen.

Two questions are asked of every row: how far is it off where its site was never measured, and its
framework elsewhere; and how far where its framework was measured nowhere. A left-out site has no
part in its own interval either: the errors of all others come from fits without both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from workbench.costmodel.rates.constants import plan_constants
from workbench.costmodel.rates.step_uncertainty import StepUncertainty
from workbench.costmodel.step_time import step_time, waiting_share
from workbench.planner.fitting.fit_rows import FitRow, fastest_steps
from workbench.planner.fitting.multiplier_fit import (
    MIN_SITES,
    SITE_ROWS,
    Array,
    Linearization,
    MultiplierFit,
    fit_without_sites,
)
from workbench.planner.published_steps import FAR_OCTAVES, StepTable
from workbench.planner.validation.error_metrics import MIN_SITE_ROWS

HELD = 0.9
"""Share of step times that an interval holds."""
FREEDOM = 4.0
"""Degrees of freedom of the t distribution that errors follow: few are far off."""
START = (0.06, 0.05, 0.1, 0.02)
"""Where the search for the causes' widths begins."""
UNCERTAINTY_PARAMETERS = len(START)


@dataclass(frozen=True)
class UncertaintyFit:
    """What the interval of each row of a fit depends on."""

    fit: MultiplierFit
    near: Linearization
    point: Array

    @cached_property
    def waiting(self) -> Array:
        """Share of each row's step that waits."""
        fitted = self.fit.constants_at(self.point)

        def share(row: FitRow) -> float:
            k = plan_constants(row.planned.plan, fitted)
            return waiting_share(row.workload, step_time(row.workload, k))

        return np.array([share(row) for row in self.fit.rows])

    @cached_property
    def _steps(self) -> StepTable:
        return StepTable(tuple(fastest_steps(self.fit.rows)))

    @cached_property
    def _distances(self) -> Array:
        """Doublings between each row and each measured step, `[rows, steps]`."""
        return np.array(
            [self._steps.distances(row.planned.plan, row.framework) for row in self.fit.rows]
        )

    def causes(
        self, rows: NDArray[np.intp], without: Iterable[str], framework: str | None = None
    ) -> Array:
        """(1, unknown framework, waiting, octaves) of some rows for a fit without these sites and
        this framework, `[4, rows]`. A row's own site is one of them where the row is predicted as
        left out.
        """
        steps = self._steps
        kept = ~np.isin(steps.sites, list(without)) & (steps.frameworks != framework)
        own = self.fit.framework_of_row[rows].astype(str)
        unknown = ~np.isin(own, steps.frameworks[kept])
        near = self._distances[np.ix_(rows, kept)].min(axis=1)
        beyond = np.maximum(0.0, near - FAR_OCTAVES)
        return np.stack((np.ones(len(rows)), unknown.astype(float), self.waiting[rows], beyond))

    def learnt(self, without: str | None = None) -> StepUncertainty:
        """The intervals' widths from the errors on all sites, or on all but one."""
        errors, causes, sites = [], [], []
        for site, framework in self._left_out(without):
            off, why = self._errors(site, framework, without)
            errors.append(off)
            causes.append(why)
            sites += [f"{site}, {'site' if framework is None else 'framework'}"] * len(off)
        return uncertainty(np.concatenate(errors), np.hstack(causes), sites)

    def _left_out(self, without: str | None) -> list[tuple[str, str | None]]:
        """What is left out in turn: each site (None), and at each site each framework."""
        others = self.fit.sites != without
        pairs = set(zip(self.fit.sites[others], self.fit.framework_of_row[others]))
        sites = {site for site, _ in pairs}
        return [*((site, None) for site in sorted(sites)), *sorted(pairs)]

    def _errors(self, site: str, framework: str | None, without: str | None) -> tuple[Array, Array]:
        """Errors and causes of a site's rows by the fit without it: those of a framework that was
        measured elsewhere, or those of `framework`, which is left out at every site.
        """
        fit = self.fit
        left = [one for one in (site, without) if one is not None]
        own = (fit.sites == site) & ((framework is None) | (fit.framework_of_row == framework))
        at = np.flatnonzero(own)
        predicted = self.near.at(fit_without_sites(fit, self.near, left, framework))
        causes = self.causes(at, left, framework)
        asked = (causes[1] == 0) | (framework is not None)
        return (fit.measured - predicted)[at[asked]], causes[:, asked]


def well_known_frameworks(fit: MultiplierFit, without: Iterable[str] = ()) -> set[str]:
    """Frameworks that were measured at three sites of three rows or more."""
    left = set(without)
    rows = Counter(pair for pair in zip(fit.framework_of_row, fit.sites) if pair[1] not in left)
    counted = Counter(str(name) for (name, _), n in rows.items() if n >= MIN_SITE_ROWS)
    return {name for name, n in counted.items() if n >= MIN_SITES}


def uncertainty(errors: Array, causes: Array, sites: list[str]) -> StepUncertainty:
    """Widths by cause, so that nine of ten errors are held.

    Args:
        errors: Logarithms of measured over left-out predicted step times, `[rows]`.
        causes: What widens the interval of each, `[4, rows]`.
        sites: Site and question of each row; each weighs no more than `SITE_ROWS` rows.
    """
    size = Counter(sites)
    weights = np.array([min(1.0, SITE_ROWS / size[name]) for name in sites])
    loss = _t_loss(errors, causes**2, weights)
    found = minimize(
        loss,
        np.log(START),
        method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-5, "fatol": 1e-8},
    )
    widths = np.exp(found.x)
    spread = np.sqrt(widths**2 @ causes**2)
    scale = weighted_quantile(np.abs(errors) / spread, weights, HELD)
    base, unknown, waiting, octave = (float(scale * width) for width in widths)
    return StepUncertainty(base, unknown, waiting, octave)


def _t_loss(errors: Array, squares: Array, weights: Array) -> Callable[[Array], float]:
    def loss(logs: Array) -> float:
        variance = np.exp(2 * logs) @ squares
        tail = 0.5 * (FREEDOM + 1) * np.log1p(errors**2 / variance / FREEDOM)
        return float((weights * (0.5 * np.log(variance) + tail)).sum())

    return loss


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """The value up to which `share` of the weights lie."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - 0.5 * weights[order]
    return float(np.interp(share * weights.sum(), reached, values[order]))
