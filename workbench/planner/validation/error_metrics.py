"""How far predictions are from measurements: errors, ranking, fitting, intervals, and what one
calibrating row buys.

All functions take arrays of positive numbers, predicted and measured in the same unit, and give
plain data. The error of a row is predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
MIN_GROUP_ROWS = 5
"""Rows below which a ranking says nothing."""
MIN_SITE_ROWS = 3
"""Clean rows from which a site counts."""
OWN_ROW_SHARE = 0.5
"""Share of its way that one row of one's own moves an estimate, as multipliers of few sites."""


def relative_errors(
    predicted: ArrayLike, measured: ArrayLike, labels: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows, mean and median absolute error, bias (the mean error, with its sign), worst row, shares
    within 5 and 10 %, and the low tail.
    """
    error = _error(predicted, measured)
    if not len(error):
        return {"rows": 0}
    size = np.abs(error)
    worst = int(size.argmax())
    return {
        "rows": len(error),
        "mape": float(size.mean()),
        "median_ape": float(np.median(size)),
        "bias": float(error.mean()),
        "p90_ape": float(np.quantile(size, 0.9)),
        "within_5": float((size <= 0.05).mean()),
        "within_10": float((size <= 0.10).mean()),
        "under_by_5": float((error < -0.05).mean()),
        "lowest_5_percent": float(np.quantile(error, 0.05)),
        "worst": {"error": float(error[worst]), **({"row": labels[worst]} if labels else {})},
    }


def _error(predicted: ArrayLike, measured: ArrayLike) -> Array:
    error: Array = np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1
    return error


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Rank correlation (ties share their mean rank); NaN where one side is constant."""
    x, y = (
        pd.Series(np.asarray(side, dtype=float)).rank().to_numpy(dtype=float) for side in (a, b)
    )
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def selection_regret(predicted: ArrayLike, measured: ArrayLike, top: int = 1) -> float:
    """How much slower the best of the `top` first by prediction is than the best of all; 0 is
    none.
    """
    costs = np.asarray(measured, dtype=float)
    first = np.argsort(np.asarray(predicted, dtype=float), kind="stable")[:top]
    return float(costs[first].min() / costs.min() - 1)


def ranking_quality(
    predicted: ArrayLike, measured: ArrayLike, groups: Sequence[Hashable]
) -> dict[str, Any]:
    """Spearman and regret inside groups of at least five rows, over groups."""
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    found = []
    for name, index in _members(groups).items():
        if len(index) >= MIN_GROUP_ROWS and np.ptp(m[index]) > 0:
            at = {"group": str(name), "rows": len(index), "spearman": spearman(p[index], m[index])}
            found.append(
                {
                    **at,
                    "top_1": selection_regret(p[index], m[index]),
                    "top_3": selection_regret(p[index], m[index], 3),
                }
            )
    if not found:
        return {"groups": 0, "rows": 0}
    table = pd.DataFrame(found)
    low = table.sort_values("spearman").iloc[0]
    return {
        "groups": len(table),
        "rows": int(table.rows.sum()),
        "spearman": float(table.spearman.mean()),
        "spearman_median": float(table.spearman.median()),
        "top_1_regret": float(table.top_1.mean()),
        "best_of_3_regret": float(table.top_3.mean()),
        "best_of_3_regret_worst": float(table.top_3.max()),
        "lowest": {"group": str(low["group"]), "spearman": float(low["spearman"])},
        "by_group": found,
    }


def _members(groups: Sequence[Hashable]) -> dict[Hashable, NDArray[np.intp]]:
    codes, names = pd.factorize(pd.Series(list(groups), dtype=object))
    order = np.argsort(codes, kind="stable")
    parts = (
        np.split(order, np.cumsum(np.bincount(codes, minlength=len(names)))[:-1])
        if len(names)
        else []
    )
    return dict(zip(names, parts))


def fit_accuracy(peak: ArrayLike, capacity: ArrayLike, status: Sequence[str]) -> dict[str, Any]:
    """Shares of rows that ran and are predicted to fit, and of those out of memory that are
    predicted not to.
    """
    fits = np.asarray(peak, dtype=float) <= np.asarray(capacity, dtype=float)
    said = np.asarray(status, dtype=object)
    ran, out, failed = (said == kind for kind in ("ran", "out_of_memory", "failed"))
    return {
        "ran": {"rows": int(ran.sum()), "predicted_to_fit": _share(fits[ran])},
        "out_of_memory": {"rows": int(out.sum()), "predicted_not_to_fit": _share(~fits[out])},
        "failed": {"rows": int(failed.sum()), "predicted_not_to_fit": _share(~fits[failed])},
    }


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def interval_coverage(measured: ArrayLike, low: ArrayLike, high: ArrayLike) -> dict[str, Any]:
    """Share of measurements inside [low, high] and at most `high`; rows without an interval (NaN)
    are left out.
    """
    m, a, b = (np.asarray(side, dtype=float) for side in (measured, low, high))
    has = np.isfinite(a) & np.isfinite(b)
    inside = (a[has] <= m[has]) & (m[has] <= b[has])
    return {
        "rows": int(has.sum()),
        "inside": _share(inside),
        "below_high": _share(m[has] <= b[has]),
    }


def leave_one_group_out(
    predicted: ArrayLike, measured: ArrayLike, groups: Sequence[Hashable]
) -> dict[str, Any]:
    """Error on each group after one scale from all other groups (the median of their medians), over
    groups.
    """
    ratio = 1 / (1 + _error(predicted, measured))
    members = _members(groups)
    if len(members) < 2:
        return {"groups": len(members)}
    middle = {name: float(np.median(ratio[index])) for name, index in members.items()}
    found: dict[str, float] = {}
    for name, index in members.items():
        scale = float(np.median([value for other, value in middle.items() if other != name]))
        found[str(name)] = float(np.abs(scale / ratio[index] - 1).mean())
    return {"groups": len(found), "mape": float(np.mean(list(found.values()))), "by_group": found}


def errors_after_calibration(
    predicted: ArrayLike, measured: ArrayLike, groups: Sequence[Hashable]
) -> dict[str, Any]:
    """Error on the other rows of a group after one of its rows has moved them half of its own way,
    over every choice of that row: what it is off itself is its site's in part, and its own in part.
    """
    ratio = 1 / (1 + _error(predicted, measured))
    total = rows = 0.0
    middles = []
    for index in _members(groups).values():
        if len(index) < 2:
            continue
        size = np.abs(ratio[index][:, None] / ratio[index][None, :] ** OWN_ROW_SHARE - 1)
        np.fill_diagonal(size, np.nan)
        own = np.nanmean(size, axis=0)  # of one row, over the rows that calibrate it
        total, rows = total + float(own.sum()), rows + len(index)
        middles.append(float(np.nanmedian(size)))
    if not rows:
        return {"rows": 0}
    return {
        "rows": int(rows),
        "groups": len(middles),
        "mape": total / rows,
        "median_ape": float(np.median(middles)),
    }


def worst_row_text(found: Mapping[str, Any]) -> str:
    """The worst row of `relative_errors`, in words."""
    at = found.get("worst", {})
    return f"{at.get('row', '')} {at['error']:+.0%}".strip() if at else ""
