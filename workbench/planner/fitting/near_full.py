"""The slow-down of a nearly full GPU, fitted to groups of rows that published what failed too.

Elsewhere only configurations that somebody chose are published, and nobody chooses one that
retries. As every effect that fewer than three sites show, it goes half of its way at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any

from workbench.costmodel.memory.near_full import retry_region
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.rates.constants import plan_constants
from workbench.costmodel.rates.fitted_constants import FittedConstants
from workbench.planner.fitting.fit_rows import FitRow, clean_rows, published_rows
from workbench.planner.fitting.multiplier_fit import MIN_SITES
from workbench.planner.validation.row_judgement import published_judgements
from workbench.units import GIB

FAILED = ("failed", "out_of_memory")
ALLOWED_FLAGS = frozenset({"inferred"})
"""An inferred shape shifts a step by percents, retries by multiples."""
DIGITS = 3


def near_full_rows(fitted: FittedConstants) -> dict[str, list[float]]:
    """Site -> logarithms of measured over predicted step time of its rows whose predicted need lies
    where the allocator retries; of groups (one model, GPUs, batch and source) with failures.
    """
    judged = published_judgements()
    rows = published_rows()
    failed = (row.label for row in rows if row.status in FAILED)
    groups = {judged[label].group for label in failed if label in judged}
    beside = (row for row in rows if row.label in judged and judged[row.label].group in groups)
    found: dict[str, list[float]] = {}
    for row in clean_rows(beside, ALLOWED_FLAGS):
        if _is_near_full(row):
            found.setdefault(row.site, []).append(math.log(row.seconds / row.predicted(fitted)))
    return found


def _is_near_full(row: FitRow) -> bool:
    plan = row.planned.plan
    k = plan_constants(plan)
    need = float(peak_memory(row.workload, k).peak.max())
    return k.fragmentation > 0 and need > retry_region(plan.gpu.memory_gib * GIB, k)


def near_full_slowdown_of(by_site: Mapping[str, Iterable[float]]) -> dict[str, Any]:
    """What `data/fitted.json` says of it: the slow-down, and the sites and rows it rests on."""
    rows = {site: list(logs) for site, logs in by_site.items()}
    seen = mean(median(logs) for logs in rows.values()) if rows else 0.0
    kept = seen if len(rows) >= MIN_SITES else seen / 2
    return {
        "slowdown": round(math.exp(max(0.0, kept)), DIGITS),
        "sites": sorted(rows),
        "rows": sum(map(len, rows.values())),
    }
