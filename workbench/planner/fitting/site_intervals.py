"""Intervals of step time from the errors on sites that no constant has seen.

Two classes are kept apart: frameworks of three sites or more, and all others, whose left-out site
leaves nothing or little of the framework itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.planner.fitting.multiplier_fit import MIN_SITES
from workbench.planner.validation.error_metrics import MIN_SITE_ROWS

Array = NDArray[np.float64]
LOW, HIGH = 0.05, 0.95
OTHER = "other"
"""Class of frameworks of fewer than three sites, and of unknown ones."""


def well_known_frameworks(frameworks: Sequence[str], sites: Sequence[str]) -> list[str]:
    """Frameworks that were measured at three sites of three rows or more."""
    rows = Counter(zip(frameworks, sites))
    counted = Counter(name for (name, _), count in rows.items() if count >= MIN_SITE_ROWS)
    return sorted(name for name, count in counted.items() if count >= MIN_SITES)


def interval_of_class(errors: Array, sites: NDArray[np.object_]) -> tuple[float, float]:
    """(low, high) multiples of the estimate that hold nine of ten step times; sites weigh alike.

    Args:
        errors: Logarithms of measured over left-out predicted step times, `[rows]`.
        sites: Site of each row.
    """
    rows_of_site = {name: int((sites == name).sum()) for name in set(sites)}
    weights = np.array([1.0 / rows_of_site[name] for name in sites])
    order = np.argsort(errors)
    reached = np.cumsum(weights[order]) - 0.5 * weights[order]
    low, high = np.interp([LOW * weights.sum(), HIGH * weights.sum()], reached, errors[order])
    return float(np.exp(low)), float(np.exp(high))


def intervals(
    errors: Array, frameworks: NDArray[np.object_], sites: NDArray[np.object_]
) -> Mapping[str, tuple[float, float]]:
    """Interval of each framework of three sites or more, which share one, and of all `OTHER`."""
    known = well_known_frameworks(list(frameworks), list(sites))
    well = np.isin(frameworks.astype(str), known)
    result = {OTHER: interval_of_class(errors[~well], sites[~well])} if (~well).any() else {}
    if well.any():
        result |= dict.fromkeys(known, interval_of_class(errors[well], sites[well]))
    return result
