"""Predictions against published measurements: rows read, turned into plans, predicted, compared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import errors
from workbench.costmodel.rates.fitted_memory import memory_fit_without
from workbench.errors import PlanError, refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.validation.framework_names import framework_defaults
from workbench.planner.validation.left_out_report import left_out_summary, own_rows_summary
from workbench.planner.validation.measured_rows import MeasuredRow, read_measured_rows
from workbench.planner.validation.predictions import (
    Predict,
    Prediction,
    expected_reading,
    predict,
    predict_left_out,
)
from workbench.planner.validation.row_consistency import inconsistent, model_flops_per_step
from workbench.planner.validation.row_judgement import (
    UNFIT_FLAGS,
    RowJudgement,
    judge_rows,
    published_judgements,
)
from workbench.planner.validation.row_reasons import cautions, remedy
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import (
    PlannedRow,
    is_complete,
    is_complete_moe,
    row_to_plan,
)
from workbench.planner.validation.validation_report import error_summary


@dataclass(frozen=True)
class Validation:
    """Every row that could be predicted, and why the others could not.

    `expressed` counts the rows that became plans; `complete` the dense rows of known model and
    batch, `complete_moe` those of mixtures of experts, and `..._expressed` those of them that
    became plans.
    """

    files: tuple[str, ...]
    rows: int
    expressed: int
    complete: int
    complete_expressed: int
    complete_moe: int
    complete_moe_expressed: int
    reasons: Mapping[str, int]
    refused: Mapping[str, int]
    """Plans that the planner refused, by the field it named."""
    table: pd.DataFrame
    """One row a prediction; columns `COLUMNS`."""
    parts: Sequence[Mapping[str, float]]
    """Of each prediction: seconds by part of the step, and GiB by category at the peak."""
    seconds: float
    """That the validation took."""

    @property
    def coverage(self) -> float | None:
        """Share of the complete dense rows that became plans; None where there are none."""
        return self.complete_expressed / self.complete if self.complete else None

    @property
    def moe_coverage(self) -> float | None:
        """The same of mixtures of experts."""
        return self.complete_moe_expressed / self.complete_moe if self.complete_moe else None

    def summary(self) -> dict[str, Any]:
        """Counts of rows, and the errors of the predictions, as plain data.

        Shares, not percent; errors are predicted / measured - 1.
        """
        return {
            "source": "estimated against measured",
            "files": list(self.files),
            "rows": self.rows,
            "expressed": self.expressed,
            "predicted": len(self.table),
            "coverage": self.coverage,
            "complete_rows": self.complete,
            "complete_rows_expressed": self.complete_expressed,
            "moe_coverage": self.moe_coverage,
            "complete_moe_rows": self.complete_moe,
            "complete_moe_rows_expressed": self.complete_moe_expressed,
            "reasons": dict(self.reasons),
            "remedies": {reason: remedy(reason) for reason in self.reasons},
            "cautions": cautions(self.table),
            "refused_by_planner": dict(self.refused),
            "left_out": left_out_summary(self.table),
            "own_rows": own_rows_summary(self.table),
            **error_summary(self.table),
            "seconds": self.seconds,
        }

    def dump(self, path: str | Path) -> Path:
        """Write every predicted row, with the parts of its prediction, as CSV. Raises `OSError`."""
        Path(path).write_text(self.to_csv(), encoding="utf-8")
        return Path(path)

    def to_csv(self) -> str:
        """The CSV that `dump` writes."""
        parts = pd.DataFrame(list(self.parts), index=self.table.index)
        return str(pd.concat([self.table, parts], axis=1).to_csv(index=False, float_format="%.6g"))


def validate(
    files: Sequence[str | Path], predict: Predict = predict, profile: str | None = None
) -> Validation:
    """Predict every row of published measurements that a plan can express, and compare.

    A row that cannot be expressed or predicted never raises: it is counted with its reason.

    Args:
        files: CSV files with one configuration a row; columns are found by name.
        predict: Peak memory and step time of one resolved plan.
        profile: Framework profile to predict all rows with, in place of each row's own.

    Returns:
        The predictions beside the measurements, and the counts of what was left out.

    Raises:
        PlanError: A file cannot be read, has no column of measurements, or the profile is unknown.
    """
    start = time.perf_counter()
    if profile is not None and profile not in framework_defaults():
        raise errors.unknown_name("profile", profile, framework_defaults())
    rows = [row for file in files for row in read_measured_rows(file)]
    if rows and not any(row.model or row.gpu or row.gpus or row.layers for row in rows):
        raise refuse(
            ", ".join(map(str, files)),
            f"has none of the columns of measurements; legal: {COLUMN_HINT}",
        )
    planned, reasons = _plan_rows(rows, profile)
    found, refused = _predict_rows(planned, predict)
    judged = _judgements(rows, [one.row for one, _ in found])
    dense = {id(row) for row in rows if is_complete(row)}
    moe = {id(row) for row in rows if is_complete_moe(row)}
    return Validation(
        files=tuple(str(file) for file in files),
        rows=len(rows),
        expressed=len(planned),
        complete=len(dense),
        complete_expressed=sum(id(one.row) in dense for one in planned),
        complete_moe=len(moe),
        complete_moe_expressed=sum(id(one.row) in moe for one in planned),
        reasons=reasons,
        refused=refused,
        table=_comparison_table(found, judged),
        parts=[prediction.parts for _, prediction in found],
        seconds=time.perf_counter() - start,
    )


def _plan_rows(
    rows: Sequence[MeasuredRow], profile: str | None
) -> tuple[list[PlannedRow], dict[str, int]]:
    planned, reasons = [], Counter[str]()
    for row in rows:
        try:
            planned.append(row_to_plan(row, profile))
        except Inexpressible as reason:
            reasons[str(reason)] += 1
    return planned, dict(reasons.most_common())


def _predict_rows(
    planned: Sequence[PlannedRow], predict: Predict
) -> tuple[list[tuple[PlannedRow, Prediction]], dict[str, int]]:
    """Each row with its prediction; equal plans are predicted once."""
    known: dict[str, Prediction | str] = {}
    found, refused = [], Counter[str]()
    for one in planned:
        key = one.plan.model_copy(update={"name": ""}).model_dump_json()
        if key not in known:
            try:
                known[key] = predict(one.plan)
            except PlanError as error:
                known[key] = error.problems[0].field
        answer = known[key]
        if isinstance(answer, str):
            refused[answer] += 1
        else:
            found.append((one, answer))
    return found, dict(refused.most_common())


def _judgements(
    rows: Sequence[MeasuredRow], predicted: Sequence[MeasuredRow]
) -> list[RowJudgement]:
    """What each predicted row is taken for: as the committed file says of a published row, else by
    the row itself and those beside it.
    """
    own = {id(row): one for row, one in zip(rows, judge_rows(rows))}
    published = published_judgements()
    return [
        published[row.label]
        if row.label in published and published[row.label].site == own[id(row)].site
        else replace(own[id(row)], site="")
        for row in predicted
    ]


def _comparison_table(
    found: Sequence[tuple[PlannedRow, Prediction]], judged: Sequence[RowJudgement]
) -> pd.DataFrame:
    """One line a predicted row; times that cannot be compared are missing."""
    table = pd.DataFrame(
        [
            _comparison_row(one, prediction, judgement.site)
            for (one, prediction), judgement in zip(found, judged)
        ],
        columns=COLUMNS,
    )
    table["suspect"] = inconsistent([one for one, _ in found])
    table["unknown_status"] = [one.row.unknown_status for one, _ in found]
    table["site"] = [one.site for one in judged]
    table["group"] = [one.group for one in judged]
    table["clean"] = np.array([not one.flags for one in judged], dtype=bool)
    table["unfit"] = np.array([bool(UNFIT_FLAGS & set(one.flags)) for one in judged], dtype=bool)
    left = [
        predict_left_out(one.plan, judgement.site) if judgement.site and one.seconds else None
        for (one, _), judgement in zip(found, judged)
    ]
    for column, name in LEFT_OUT_COLUMNS.items():
        table[column] = [getattr(one, name) if one else None for one in left]
    table["memory_ratio"] = table.predicted_gib / table.measured_gib
    table["time_ratio"] = table.predicted_s / table.measured_s
    return table


LEFT_OUT_COLUMNS = {
    "left_out_s": "seconds",
    "left_out_low": "low",
    "left_out_high": "high",
    "well_known": "well_known",
}
"""Column -> field of `LeftOut`."""
COLUMN_HINT = (
    "a CSV file whose header names columns such as model, layers, hidden, heads, vocab, seq, gpu, "
    "n_gpus, tp, pp, "
    "mbs, gbs, iter_time_s and mem_gib"
)
COLUMNS = [
    "row",
    "file",
    "source",
    "table",
    "framework",
    "profile",
    "predicted_with",
    "model",
    "gpu",
    "card",
    "gpus",
    "status",
    "memory_kind",
    "card_gib",
    "needed_gib",
    "measured_gib",
    "predicted_gib",
    "gib_from",
    "gib_to",
    "gib_low",
    "gib_high",
    "in_sample_gib",
    "measured_s",
    "predicted_s",
    "s_low",
    "s_high",
    "tokens",
    "utilisation",
    "doubted",
    "layout",
    "assumed",
]


def _comparison_row(one: PlannedRow, p: Prediction, site: str) -> tuple[Any, ...]:
    row, plan = one.row, one.plan
    memory = one.memory_gib if row.status != "failed" else None
    seconds = one.seconds if row.status == "ran" else None
    peak = plan.gpu.tflops.get("bf16", plan.gpu.tflops.get("fp16", plan.gpu.tflops["fp32"]))
    done = (
        model_flops_per_step(plan) / (seconds * plan.world_size * peak * 1e12) if seconds else None
    )
    return (
        row.label,
        row.file,
        row.source,
        row.table,
        row.framework,
        one.profile,
        plan.strategy.stack,
        row.model,
        row.gpu,
        plan.gpu.name,
        plan.world_size,
        row.status,
        row.memory_kind,
        plan.gpu.memory_gib,
        p.peak_gib,
        memory,
        *_reading_cells(one, p, site),
        seconds,
        p.seconds,
        p.seconds_low,
        p.seconds_high,
        plan.training.global_batch * plan.training.sequence_length,
        done,
        row.flagged_by_source,
        _strategy_text(plan),
        " ".join(one.assumed),
    )


def _reading_cells(one: PlannedRow, p: Prediction, site: str) -> tuple[float | None, ...]:
    """(likely reading, the least and the most that it can be, 5 % and 95 % bounds), GiB, of a
    published row by the fit that has not seen its site; and its likely reading by the published
    fit. Where a prediction has no readings, the GPU's own.
    """
    seen = expected_reading(one.row, p, one.profile)
    left = expected_reading(one.row, p, one.profile, memory_fit_without(site)) if site else seen
    if seen is None or left is None:
        return p.peak_gib, p.peak_gib, p.peak_gib, p.peak_low, p.peak_high, p.peak_gib
    return left.likely, left.least, left.most, left.low, left.high, seen.likely


def _strategy_text(plan: ResolvedPlan) -> str:
    """The strategy in one line, as people write it in a table."""
    s, t = plan.strategy, plan.training
    recompute = s.recompute if isinstance(s.recompute, str) else f"{len(s.recompute)} layers"
    sizes = " ".join(f"{axis[0]}{size}" for axis, size in plan.sizes.items())
    chunks = f" v{s.pipeline.chunks}" if s.pipeline.chunks > 1 else ""
    return (
        f"{sizes}{chunks} z{s.data.zero} mb{t.micro_batch} gb{t.global_batch} s{t.sequence_length} "
        f"{s.precision} {recompute}{' sp' if s.tensor.sequence else ''}"
    )
