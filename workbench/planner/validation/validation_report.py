"""What a validation says: metrics of memory, time, ranking and fitting, by kind of memory and by
stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.planner.validation import error_metrics
from workbench.planner.validation.validate import numbers

if TYPE_CHECKING:
    from workbench.planner.validation.validate import Validation

KINDS = ("allocated", "reserved", "nvidia-smi", "unknown")


def summary(found: Validation) -> dict[str, Any]:
    """The whole answer as plain data; shares, not percent; errors are predicted / measured - 1."""
    table = found.table
    return {
        "source": "estimated against measured",
        "files": list(found.files),
        "rows": found.rows,
        "expressed": found.expressed,
        "predicted": len(table),
        "coverage": found.coverage,
        "complete_rows": found.complete,
        "complete_rows_expressed": found.complete_expressed,
        "reasons": dict(found.reasons),
        "refused_by_planner": dict(found.refused),
        "suspect": int(table.suspect.sum()),
        "memory": memory(table),
        "time": time(table),
        "groups": groups(table),
        "fit": error_metrics.fit(table.needed_gib, table.card_gib, list(table.status)),
        "by_stack": {name: _both(part) for name, part in table.groupby("stack")},
        "seconds": found.seconds,
    }


def memory(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the peak by what was read, and of all readings the reserve that leaving one source
    out asks for.
    """
    has = table[table.measured_gib.notna()]
    by_kind = {
        kind: memory_errors(has[has.memory_kind == kind])
        for kind in KINDS
        if kind in set(has.memory_kind)
    }
    reserve = (
        error_metrics.reserve(has.predicted_gib, has.measured_gib, list(has.source))
        if len(has)
        else {"rows": 0}
    )
    return {**by_kind, "reserve_95": reserve}


def memory_errors(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the peak over the rows that have one, and coverage of its interval."""
    has = table[table.measured_gib.notna()]
    found = error_metrics.errors(has.predicted_gib, has.measured_gib, list(has.row))
    return {
        **found,
        "interval": error_metrics.coverage(
            has.measured_gib, numbers(has.gib_low), numbers(has.gib_high)
        ),
    }


def time(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the step time over rows that pass the consistency check; `clean` and `all` beside.

    Clean rows also use less than 90 % of the card and more than 5 % of its peak, and their table
    does not warn of them.
    """
    has = timed(table)
    passed = has[~has.suspect]
    return {
        **time_errors(passed),
        "clean": time_errors(has[has.clean]),
        "all": time_errors(has),
        "leave_one_source_out": _without_groups(
            error_metrics.leave_one_out, passed, list(passed.source)
        ),
        "after_one_row": error_metrics.calibrated(
            numbers(passed.predicted_s), numbers(passed.measured_s), _alike(passed)
        ),
        "after_one_row_clean": error_metrics.calibrated(
            numbers(has[has.clean].predicted_s),
            numbers(has[has.clean].measured_s),
            _alike(has[has.clean]),
        ),
    }


def _without_groups(metric: Any, table: pd.DataFrame, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = metric(numbers(table.predicted_s), numbers(table.measured_s), names)
    return found


def _alike(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """What one calibrating row speaks for: the same stack, table and card."""
    return list(zip(table["stack"], table["table"], table["gpu"]))


def timed(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with a measured and a predicted time."""
    return table[table.measured_s.notna() & table.predicted_s.notna()]


def time_errors(table: pd.DataFrame) -> dict[str, Any]:
    """Errors of the step time over the rows that have one, and coverage of its interval."""
    has = timed(table)
    predicted, measured = numbers(has.predicted_s), numbers(has.measured_s)
    found = error_metrics.errors(predicted, measured, list(has.row))
    return {
        **found,
        "interval": error_metrics.coverage(measured, numbers(has.s_low), numbers(has.s_high)),
    }


def groups(table: pd.DataFrame) -> dict[str, Any]:
    """Ranking by seconds a token inside groups of the same model and cluster."""
    has = timed(table)
    has = has[~has.suspect]
    tokens = numbers(has.tokens)
    names = list(zip(has.model, has.card, has.gpus))
    return error_metrics.ranking(
        numbers(has.predicted_s) / tokens, numbers(has.measured_s) / tokens, names
    )


def split(table: pd.DataFrame, by: str) -> dict[str, Any]:
    """Memory and time errors of each value of the column `by`."""
    return {str(name): _both(part) for name, part in table.groupby(by)}


def _both(table: pd.DataFrame) -> dict[str, Any]:
    passed = table[~table.suspect]
    return {
        "rows": len(table),
        "memory": memory_errors(table),
        "time": time_errors(passed),
        "clean": time_errors(table[table.clean]),
    }


def line(found: dict[str, Any]) -> tuple[str, ...]:
    """One set of errors in words: rows, mean, median, bias, within 10 %, worst row."""
    if not found.get("rows"):
        return ("0", "", "", "", "", "")
    shares = (found["mape"], found["median_ape"], found["bias"], found["within_10"])
    signs = ("{:.1%}", "{:.1%}", "{:+.1%}", "{:.0%}")
    return (
        str(found["rows"]),
        *(sign.format(value) for sign, value in zip(signs, shares)),
        error_metrics.worst(found),
    )


def finite(value: float) -> bool:
    """Whether a figure is a number."""
    return bool(np.isfinite(value))
