"""Errors of peak memory: by kind of reading, by site, and of the interval around it.

Readings of published rows are predicted with the fit that has not seen their site
(`data/fitted_memory.json`). One that does not say what it reads is judged by its distance from the
range between what would be allocated and what reserved, and by the likeliest in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.costmodel.memory.reported_memory import REPORTED_KINDS, UNKNOWN_KIND
from workbench.costmodel.rates.fitted_memory import fitted_memory_document
from workbench.planner.validation import error_metrics
from workbench.planner.validation.row_judgement import contradicts_memory

APART = "contradictory"
"""Rows of pages whose readings contradict themselves: listed, and counted nowhere else."""
LIKELY = "unknown, likely reading"
CERTAIN = "nothing inferred"
"""Rows of a kind whose model and layout their page gives, and which neither contradict themselves
nor are called noisy.
"""


def memory_errors_by_kind(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of every kind of reading in a table of predictions, by kind."""
    has = table[table.measured_gib.notna()]
    apart = np.array([contradicts_memory(source) for source in has.source], dtype=bool)
    counted = has[~apart]
    found: dict[str, dict[str, Any]] = {}
    for kind in (*REPORTED_KINDS, UNKNOWN_KIND):
        rows = counted[counted.memory_kind == kind]
        found[kind] = memory_errors(rows)
        if rows.unfit.any():
            found[f"{kind}, {CERTAIN}"] = memory_errors(rows[~rows.unfit])
    open_ = counted[counted.memory_kind == UNKNOWN_KIND]
    found[LIKELY] = _errors(open_, open_.predicted_gib)
    found[APART] = memory_errors(has[apart])
    return {kind: errors for kind, errors in found.items() if errors["rows"]}


def memory_errors(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of peak memory over the rows that report one, from the nearest end of the range that
    each can be in, and coverage of the 90 % interval.
    """
    has = table[table.measured_gib.notna()]
    measured, least, most = (
        pd.to_numeric(has[name], errors="coerce").to_numpy(dtype=float)
        for name in ("measured_gib", "gib_from", "gib_to")
    )
    return _errors(has, pd.Series(np.clip(measured, least, most), index=has.index))


def _errors(has: pd.DataFrame, predicted: pd.Series[Any]) -> dict[str, Any]:
    low, high = (pd.to_numeric(has[name], errors="coerce") for name in ("gib_low", "gib_high"))
    return {
        **error_metrics.relative_errors(predicted, has.measured_gib, list(has.row)),
        "interval": error_metrics.interval_coverage(has.measured_gib, low, high),
    }


def memory_left_out(table: pd.DataFrame) -> dict[str, Any]:
    """Errors and intervals of readings on left-out sites; empty where no row is a published one."""
    has = table[table.measured_gib.notna() & (table.site != "")]
    has = has[[not contradicts_memory(source) for source in has.source]]
    if has.empty:
        return {}
    return {
        "fitted_constants": fitted_memory_document().get("fitted_constants", 0),
        "interval": memory_errors(has)["interval"],
        "sites": [
            {"site": site, "kind": kind, **memory_errors(part), "in_sample": _in_sample(part)}
            for (site, kind), part in has.groupby(["site", "memory_kind"])
        ],
    }


def _in_sample(part: pd.DataFrame) -> float:
    """Mean error of the likely reading by the fit to all sites."""
    return float((part.in_sample_gib / part.measured_gib - 1).abs().mean())


def failure_ranking(table: pd.DataFrame) -> dict[str, Any]:
    """Area under the curve of needed memory over the GPU's, of rows that failed against those of
    the same framework that ran; 0.5 is chance.
    """
    failed = table[table.status == "failed"]
    ran = table[(table.status == "ran") & table["profile"].isin(set(failed["profile"]))]
    share = pd.concat([failed.needed_gib / failed.card_gib, ran.needed_gib / ran.card_gib])
    count, others = len(failed), len(ran)
    if not count or not others:
        return {"rows": 0, "area": None}
    ranks = share.rank().to_numpy()[:count].sum()
    return {
        "rows": count + others,
        "area": float((ranks - count * (count + 1) / 2) / (count * others)),
    }
