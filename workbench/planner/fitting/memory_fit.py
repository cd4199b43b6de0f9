"""Fit of what readings of memory add to a prediction: the allocator's slack, and their spread.

The share by which what an allocator reserves exceeds what it handed out is fitted. The spread
follows from readings on sites that it has not seen; sites weigh alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.costmodel.frameworks.framework_profile import fallback_framework
from workbench.costmodel.memory.reported_memory import UNKNOWN_KIND
from workbench.costmodel.rates.fitted_memory import MemoryFit
from workbench.errors import PlanError
from workbench.planner.validation.error_metrics import MIN_SITE_ROWS
from workbench.planner.validation.measured_rows import MeasuredRow
from workbench.planner.validation.predictions import Prediction, expected_reading, predict
from workbench.planner.validation.row_judgement import (
    UNFIT_FLAGS,
    RowJudgement,
    contradicts_memory,
    published_judgements,
)
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import row_to_plan
from workbench.units import GIB

SOURCE = "python -m workbench.planner.fitting --memory, from data/validation/published.csv.gz"
QUANTILES = (0.05, 0.5, 0.95)
FULL = 0.9
"""Share of a GPU's memory beyond which a reading says nothing of slack: the allocator gives it
back.
"""


@dataclass(frozen=True)
class ReadRow:
    """A row with a reading, and what is predicted of it."""

    row: MeasuredRow
    site: str
    profile: str
    measured: float
    """GiB."""
    named: Prediction
    """By its framework's profile."""
    unnamed: Prediction
    """By the profile of an unknown framework."""

    def log_error(self, p: Prediction, fit: MemoryFit) -> float:
        """Logarithm of the reading over its prediction: 0 anywhere between the kinds that it can
        be.
        """
        expected = expected_reading(self.row, p, self.profile, fit)
        assert expected is not None
        nearest = float(np.clip(self.measured, expected.least, expected.most))
        return float(np.log(self.measured / nearest))


def read_rows(rows: Iterable[MeasuredRow]) -> list[ReadRow]:
    """Rows that ran and have a reading; neither they nor their pages contradict themselves."""
    judged: Mapping[str, RowJudgement] = published_judgements()
    found: list[ReadRow] = []
    for row in rows:
        judgement = judged.get(row.label)
        if judgement is None or row.status != "ran" or contradicts_memory(row.source):
            continue
        if UNFIT_FLAGS & set(judgement.flags):
            continue
        try:
            one, other = row_to_plan(row), row_to_plan(row, fallback_framework())
            if one.memory_gib is not None:
                found.append(
                    ReadRow(
                        row,
                        judgement.site,
                        one.profile,
                        one.memory_gib,
                        predict(one.plan),
                        predict(other.plan),
                    )
                )
        except (Inexpressible, PlanError):
            continue
    return found


def memory_document(rows: Sequence[ReadRow]) -> dict[str, Any]:
    """What `data/fitted_memory.json` holds: the fit to all sites, and those without each site."""
    sites = sorted({one.site for one in rows})
    return {
        "source": SOURCE,
        "fitted_constants": 1 + 2 * len(QUANTILES),
        "rows": len(rows),
        "fit": memory_fit(rows).to_dict(),
        "without": {
            site: memory_fit([one for one in rows if one.site != site]).to_dict() for site in sites
        },
    }


def memory_fit(rows: Sequence[ReadRow]) -> MemoryFit:
    """Fit the slack to `rows`, and the spread to what each of their sites shows of a slack that is
    fitted without it.
    """
    named, unnamed, sites = [], [], [one.site for one in rows]
    without = {
        site: MemoryFit(fit_slack([one for one in rows if one.site != site])) for site in set(sites)
    }
    for one in rows:
        named.append(one.log_error(one.named, without[one.site]))
        unnamed.append(one.log_error(one.unnamed, without[one.site]))
    return MemoryFit(fit_slack(rows), spread(named, sites), spread(unnamed, sites))


def fit_slack(rows: Sequence[ReadRow]) -> float:
    """Mean over sites of the median share by which reserved memory exceeds what is predicted to be
    allocated; rows that say neither, or whose GPU is nearly full, say nothing of it. Sites count
    from `MIN_SITE_ROWS` such rows.
    """
    shares: dict[str, list[float]] = {}
    for one in rows:
        share = _slack_of_row(one)
        if share is not None:
            shares.setdefault(one.site, []).append(share)
    medians = [float(np.median(found)) for found in shares.values() if len(found) >= MIN_SITE_ROWS]
    return max(0.0, float(np.mean(medians))) if medians else 0.0


def _slack_of_row(one: ReadRow) -> float | None:
    reported = one.named.reported
    if one.row.memory_kind not in ("reserved", "nvidia-smi") or reported is None:
        return None
    if one.measured * GIB > FULL * reported.capacity:
        return None
    shown = reported.readings(0.0)[one.row.memory_kind]
    rank = 0 if one.row.memory_of_first_stage else int(np.argmax(shown))
    excess = one.measured * GIB - float(shown[rank])
    return excess / float(reported.allocated[rank])


def spread(errors: Sequence[float], sites: Sequence[str]) -> tuple[float, float, float]:
    """Quantiles of exp(`errors`); sites of `MIN_SITE_ROWS` rows or more count, and weigh alike."""
    size = Counter(sites)
    counted = np.array([size[name] >= MIN_SITE_ROWS for name in sites])
    weights = np.array([1.0 / size[name] for name in sites])[counted]
    values = np.array(errors)[counted]
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - 0.5 * weights[order]
    low, middle, high = np.exp(
        np.interp(np.array(QUANTILES) * weights.sum(), reached, values[order])
    )
    return float(low), float(middle), float(high)


def kinds_of(rows: Sequence[ReadRow]) -> dict[str, int]:
    """Rows by kind of reading."""
    kinds = [one.row.memory_kind or UNKNOWN_KIND for one in rows]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}
