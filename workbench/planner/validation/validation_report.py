"""Errors of a table of predictions: memory, step time, ranking and fit, whole and by framework
profile.

Every function takes the table of a `Validation` (or a part of it) and returns plain data: shares,
not percent; errors are predicted / measured - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.planner.validation import error_metrics
from workbench.planner.validation.memory_report import (
    failure_ranking,
    memory_errors,
    memory_errors_by_kind,
    memory_left_out,
)


def error_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Every metric of a table of predictions.

    Args:
        table: One row a prediction, with the columns of `validate.COLUMNS` and `suspect`, `clean`.

    Returns:
        `memory` and `time` errors, memory on left-out sites, ranking of `failures` and inside
        `groups`, `fit` against the GPU's memory, and the errors of each framework profile
        (`by_profile`).
    """
    return {
        "suspect": int(table.suspect.sum()),
        "memory": memory_errors_by_kind(table),
        "memory_left_out": memory_left_out(table),
        "failures": failure_ranking(table),
        "time": step_time_summary(table),
        "groups": ranking_errors(table),
        "fit": error_metrics.fit_accuracy(table.needed_gib, table.card_gib, list(table.status)),
        "by_profile": {name: _memory_and_time(part) for name, part in table.groupby("profile")},
    }


def step_time_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the step time over rows that pass the consistency check, over `clean` and `all`
    rows.

    Clean rows also use less than 90 % of the GPU's memory and more than 5 % of its peak FLOP/s, and
    their source does not flag them.
    """
    has = timed_rows(table)
    passed = has[~has.suspect]
    return {
        **time_errors(passed),
        "clean": time_errors(has[has.clean]),
        "all": time_errors(has),
        "leave_one_source_out": _without_groups(
            error_metrics.leave_one_group_out, passed, list(passed.source)
        ),
        "after_one_row": error_metrics.errors_after_calibration(
            as_floats(passed.predicted_s), as_floats(passed.measured_s), _calibration_groups(passed)
        ),
        "after_one_row_clean": error_metrics.errors_after_calibration(
            as_floats(has[has.clean].predicted_s),
            as_floats(has[has.clean].measured_s),
            _calibration_groups(has[has.clean]),
        ),
    }


def _without_groups(metric: Any, table: pd.DataFrame, names: list[str]) -> dict[str, Any]:
    errors: dict[str, Any] = metric(
        as_floats(table.predicted_s), as_floats(table.measured_s), names
    )
    return errors


def _calibration_groups(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Rows that one row can calibrate: the same framework profile, table and GPU."""
    return list(zip(table["profile"], table["table"], table["gpu"]))


def timed_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with a measured and a predicted time."""
    return table[table.measured_s.notna() & table.predicted_s.notna()]


def time_errors(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the step time over the rows that report one, and coverage of its 90 % interval."""
    has = timed_rows(table)
    predicted, measured = as_floats(has.predicted_s), as_floats(has.measured_s)
    found = error_metrics.relative_errors(predicted, measured, list(has.row))
    return {
        **found,
        "interval": error_metrics.interval_coverage(
            measured, as_floats(has.s_low), as_floats(has.s_high)
        ),
    }


def ranking_errors(table: pd.DataFrame) -> dict[str, Any]:
    """How well plans are ranked by seconds a token, inside groups of one model on one cluster."""
    has = timed_rows(table)
    has = has[~has.suspect]
    tokens = as_floats(has.tokens)
    names = list(zip(has.model, has.card, has.gpus))
    return error_metrics.ranking_quality(
        as_floats(has.predicted_s) / tokens, as_floats(has.measured_s) / tokens, names
    )


def errors_by_column(table: pd.DataFrame, by: str) -> dict[str, Any]:
    """Memory and time errors of each value of the column `by`."""
    return {str(name): _memory_and_time(part) for name, part in table.groupby(by)}


def _memory_and_time(table: pd.DataFrame) -> dict[str, Any]:
    passed = table[~table.suspect]
    return {
        "rows": len(table),
        "memory": memory_errors(table),
        "time": time_errors(passed),
        "clean": time_errors(table[table.clean]),
    }


def error_cells(errors: dict[str, Any]) -> tuple[str, ...]:
    """One set of errors as cells of a table: rows, mean, median, bias, within 10 %, worst row."""
    if not errors.get("rows"):
        return ("0", "", "", "", "", "")
    shares = (errors["mape"], errors["median_ape"], errors["bias"], errors["within_10"])
    signs = ("{:.1%}", "{:.1%}", "{:+.1%}", "{:.0%}")
    return (
        str(errors["rows"]),
        *(sign.format(value) for sign, value in zip(signs, shares)),
        error_metrics.worst_row_text(errors),
    )


def as_floats(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """A column as floats; missing values become NaN."""
    return pd.to_numeric(column, errors="coerce").to_numpy(dtype=float)
