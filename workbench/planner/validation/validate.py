"""Predictions against published measurements: read, express, predict, compare."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import errors
from workbench.costmodel.memory.reported_memory import reported_memory_interval
from workbench.errors import PlanError, refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.validation.framework_names import stacks
from workbench.planner.validation.measured_rows import Row, read
from workbench.planner.validation.predictions import Predict, Prediction, predict
from workbench.planner.validation.row_consistency import flops, suspect
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import Expressed, complete, express

NEAR_LIMIT = 0.9
"""Share of the card above which allocators retry and times mean little."""
SLOW = 0.05
"""Utilisation below which a measured time says more about the machine than about the plan."""


@dataclass(frozen=True)
class Validation:
    """Every row that could be predicted, and why the others could not."""

    files: tuple[str, ...]
    rows: int
    expressed: int
    complete: int
    complete_expressed: int
    reasons: Mapping[str, int]
    refused: Mapping[str, int]
    """Plans that the planner refused, by the field it named."""
    table: pd.DataFrame
    """A row a prediction; columns `COLUMNS`."""
    parts: Sequence[Mapping[str, float]]
    seconds: float

    @property
    def coverage(self) -> float | None:
        """Share of the dense rows with complete fields that could be expressed."""
        return self.complete_expressed / self.complete if self.complete else None

    def summary(self) -> dict[str, Any]:
        """The whole answer, as plain data."""
        from workbench.planner.validation.validation_report import summary

        return summary(self)

    def dump(self, path: str | Path) -> Path:
        """Write every predicted row, with the parts of its prediction, as CSV. Raises `OSError`."""
        Path(path).write_text(self.to_csv(), encoding="utf-8")
        return Path(path)

    def to_csv(self) -> str:
        """The lines of `dump`."""
        parts = pd.DataFrame(list(self.parts), index=self.table.index)
        return str(pd.concat([self.table, parts], axis=1).to_csv(index=False, float_format="%.6g"))


def validate(
    files: Sequence[str | Path], predict: Predict = predict, profile: str | None = None
) -> Validation:
    """Read every row of `files`, predict those that can be expressed, and set prediction beside
    measurement.

    `profile` names one stack to predict all rows with, in place of each row's own. Raises
    `PlanError` where a file cannot be read or the profile is unknown; a row never fails the run, it
    is counted with its reason.
    """
    start = time.perf_counter()
    if profile is not None and profile not in stacks():
        raise errors.unknown_name("profile", profile, stacks())
    rows = [row for file in files for row in read(file)]
    if rows and not any(row.model or row.gpu or row.gpus or row.layers for row in rows):
        raise refuse(
            ", ".join(map(str, files)), f"has none of the columns of measurements; legal: {HEADER}"
        )
    said, reasons = _expressed(rows, profile)
    found, refused = _predicted(said, predict)
    must = {id(row) for row in rows if complete(row)}
    return Validation(
        files=tuple(str(file) for file in files),
        rows=len(rows),
        expressed=len(said),
        complete=len(must),
        complete_expressed=sum(id(one.row) in must for one in said),
        reasons=reasons,
        refused=refused,
        table=_table(found),
        parts=[prediction.parts for _, prediction in found],
        seconds=time.perf_counter() - start,
    )


def _expressed(rows: Sequence[Row], profile: str | None) -> tuple[list[Expressed], dict[str, int]]:
    said, reasons = [], Counter[str]()
    for row in rows:
        try:
            said.append(express(row, profile))
        except Inexpressible as reason:
            reasons[str(reason)] += 1
    return said, dict(reasons.most_common())


def _predicted(
    said: Sequence[Expressed], predict: Predict
) -> tuple[list[tuple[Expressed, Prediction]], dict[str, int]]:
    """Each row with its prediction; equal plans are predicted once."""
    known: dict[str, Prediction | str] = {}
    found, refused = [], Counter[str]()
    for one in said:
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


def _table(found: Sequence[tuple[Expressed, Prediction]]) -> pd.DataFrame:
    """One line a predicted row; times that cannot be compared are missing."""
    table = pd.DataFrame([_line(one, prediction) for one, prediction in found], columns=COLUMNS)
    table["suspect"] = suspect([one for one, _ in found])
    used = table.measured_gib / table.card_gib > NEAR_LIMIT
    table["clean"] = (
        ~table.suspect & ~table.doubted.astype(bool) & ~used & ~(table.utilisation < SLOW)
    )
    table["memory_ratio"] = table.predicted_gib / table.measured_gib
    table["time_ratio"] = table.predicted_s / table.measured_s
    return table


HEADER = (
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
    "stack",
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
    "gib_low",
    "gib_high",
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


def _line(one: Expressed, p: Prediction) -> tuple[Any, ...]:
    row, plan = one.row, one.plan
    memory = one.memory_gib if row.status != "failed" else None
    seconds = one.seconds if row.status == "ran" else None
    peak = plan.gpu.tflops.get("bf16", plan.gpu.tflops.get("fp16", plan.gpu.tflops["fp32"]))
    done = flops(plan) / (seconds * plan.world_size * peak * 1e12) if seconds else None
    return (
        row.label,
        row.file,
        row.source,
        row.table,
        row.framework,
        one.stack,
        row.model,
        row.gpu,
        plan.gpu.name,
        plan.world_size,
        row.status,
        row.memory_kind,
        plan.gpu.memory_gib,
        p.peak_gib,
        memory,
        *reading(row, p, one.stack),
        seconds,
        p.seconds,
        p.seconds_low,
        p.seconds_high,
        plan.training.global_batch * plan.training.sequence_length,
        done,
        row.doubted,
        _layout(plan),
        " ".join(one.assumed),
    )


def reading(row: Row, p: Prediction, stack: str = "") -> tuple[float, float | None, float | None]:
    """(what the row's way of reading should show, its 5 % and 95 % bounds), GiB; the card's own
    where none is known.
    """
    stages = p.readings.get(row.memory_reading)
    if not p.readings:
        return p.peak_gib, p.peak_low, p.peak_high
    shown = p.peak_gib if not stages else stages[0] if row.memory_first else max(stages)
    low, _, high = reported_memory_interval(row.memory_kind, stack)
    return shown, shown * low, shown * high


def _layout(plan: ResolvedPlan) -> str:
    """The strategy in one line, as people write it in a table."""
    s, t = plan.strategy, plan.training
    recompute = s.recompute if isinstance(s.recompute, str) else f"{len(s.recompute)} layers"
    sizes = " ".join(f"{axis[0]}{size}" for axis, size in plan.sizes.items())
    chunks = f" v{s.pipeline.chunks}" if s.pipeline.chunks > 1 else ""
    return (
        f"{sizes}{chunks} z{s.data.zero} mb{t.micro_batch} gb{t.global_batch} s{t.sequence_length} "
        f"{s.precision} {recompute}{' sp' if s.tensor.sequence else ''}"
    )


def numbers(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """A column as floats, missing as NaN."""
    return pd.to_numeric(column, errors="coerce").to_numpy(dtype=float)
