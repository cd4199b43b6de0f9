"""How far step times are off on sites that no fitted constant has seen.

Every published row is predicted with the fit from which its whole site was absent
(`data/fitted.json`), beside the fit to all sites. Sites weigh alike, whatever their number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.costmodel.rates.fitted_memory import fitted_memory_document
from workbench.planner.validation import error_metrics
from workbench.planner.validation.error_metrics import MIN_SITE_ROWS
from workbench.planner.validation.validation_report import as_floats

BOOTSTRAPS = 1000
SEED = 0


def left_out_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Errors on left-out sites, over the clean rows of published sites.

    Args:
        table: Predictions with the columns of `validate.COLUMNS`.

    Returns:
        Empty where no row is a published one; else `sites` (one entry a site of three clean rows
        or more), `small_sites`, `unclean_sites` (which no figure counts), the mean and median over
        sites, ranking, interval and calibration.
    """
    timed = table[table.left_out_s.notna() & table.measured_s.notna()]
    rows = timed[timed.clean]
    if rows.empty:
        return {}
    by_site = [_site_errors(str(site), part) for site, part in rows.groupby("site")]
    counted = [one for one in by_site if one["rows"] >= MIN_SITE_ROWS]
    return {
        "rows": len(rows),
        "fitted_constants": _num_fitted(),
        "mean_over_sites": _over_sites(counted, np.mean, "left_out"),
        "median_over_sites": _over_sites(counted, np.median, "left_out"),
        "in_sample_mean_over_sites": _over_sites(counted, np.mean, "in_sample"),
        "in_sample_median_over_sites": _over_sites(counted, np.median, "in_sample"),
        "groups": _ranking(rows),
        "interval": _interval(rows),
        "after_one_row": error_metrics.errors_after_calibration(
            as_floats(rows.left_out_s),
            as_floats(rows.measured_s),
            list(zip(rows.site, rows["predicted_with"])),
        ),
        "sites": counted,
        "small_sites": [one for one in by_site if one["rows"] < MIN_SITE_ROWS],
        "unclean_sites": [
            _site_errors(str(site), part) | {"ranking": _ranking(part)}
            for site, part in timed.groupby("site")
            if not part.clean.any()
        ],
    }


def own_rows_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Rows of no published site, which the published fit predicts; empty where there are none.

    Args:
        table: Predictions with the columns of `validate.COLUMNS`, and `site`.
    """
    own = table[table.site == ""]
    if own.empty:
        return {}
    width = (as_floats(own.s_high) - as_floats(own.s_low)) / 2 / as_floats(own.predicted_s)
    return {
        "rows": len(own),
        "predicted_with": "published fit",
        "fitted_constants": _num_fitted(),
        "median_half_width": float(np.nanmedian(width)) if np.isfinite(width).any() else None,
    }


def _num_fitted() -> int:
    """Fitted constants of time and memory together, widths of intervals included."""
    documents = fitted_document(), fitted_memory_document()
    return sum(int(one.get("fitted_constants", 0)) for one in documents)


def _ranking(rows: pd.DataFrame) -> dict[str, Any]:
    """Ranking of left-out predictions within groups, by seconds a token."""
    tokens = as_floats(rows.tokens)
    return error_metrics.ranking_quality(
        as_floats(rows.left_out_s) / tokens, as_floats(rows.measured_s) / tokens, list(rows.group)
    )


def _site_errors(site: str, part: pd.DataFrame) -> dict[str, Any]:
    left, inside = (
        error_metrics.relative_errors(as_floats(part[name]), as_floats(part.measured_s))
        for name in ("left_out_s", "predicted_s")
    )
    return {
        "site": site,
        "rows": len(part),
        "frameworks": sorted(set(part["profile"])),
        "left_out": left["mape"],
        "left_out_bias": left["bias"],
        "in_sample": inside["mape"],
    }


def _over_sites(sites: list[dict[str, Any]], average: Any, what: str) -> float | None:
    return float(average([one[what] for one in sites])) if sites else None


def _interval(rows: pd.DataFrame) -> dict[str, Any]:
    """Share of rows inside their interval, its 90 % range over sites drawn with replacement, and
    the median half-width of well known frameworks.
    """
    measured, low, high = (
        as_floats(rows[name]) for name in ("measured_s", "left_out_low", "left_out_high")
    )
    inside = pd.Series((low <= measured) & (measured <= high)).groupby(rows.site.to_numpy())
    held, count = inside.sum().to_numpy(), inside.count().to_numpy()
    drawn = np.random.default_rng(SEED).integers(0, len(held), (BOOTSTRAPS, len(held)))
    shares = held[drawn].sum(axis=1) / count[drawn].sum(axis=1)
    width = (high - low) / 2 / as_floats(rows.left_out_s)
    known = rows.well_known.to_numpy(dtype=bool)
    return {
        "rows": len(rows),
        "inside": float(held.sum() / count.sum()),
        "inside_over_drawn_sites": [float(np.quantile(shares, q)) for q in (0.05, 0.95)],
        "median_half_width": float(np.median(width)),
        "median_half_width_well_known": float(np.median(width[known])) if known.any() else None,
    }
