"""What graph-kernel fusion saves: bytes that memory-bound operators move on three paths.

`primitive`: every elementwise operator and reduction by itself, attention with its scores in
memory, as a graph compiler finds them; `eager`: torch's kernels, of which norms, activations,
softmax and attention hold several of those; `fused`: the plan's fused or compiled kernels.
Operators are rehearsed, their seconds estimated by the roofline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

PATHS = ("primitive", "eager", "fused")
OUTSIDE = {"optimizer": "optimizer and clipping"}
"""Phase of what no module runs -> its row; other phases: `GRADIENTS`."""
GRADIENTS = "sums of gradients"
Row = Mapping[str, Any]


def both_kernels(plan: Plan) -> tuple[ResolvedPlan, ResolvedPlan]:
    """The plan with eager and with fused kernels; compiled ones where a GPU has no Triton."""
    kinds = "eager", "fused" if plan.resolve().gpu.device == "cuda" else "compiled"
    eager, fused = (plan.replace(**{"strategy.kernels": kind}).resolve() for kind in kinds)
    return eager, fused


def kernel_fusion(eager: Mapping[str, Any], fused: Mapping[str, Any]) -> dict[str, Any]:
    """Both rehearsals' operators side by side, of the rank that computes longest.

    Args:
        eager: `notes["operators"]` of a rehearsal with eager kernels.
        fused: Of the same plan with fused or compiled ones.

    Returns:
        `rows`: by class of module, on each path `operators`, `bytes` and `seconds` of a step;
        `seconds`: of a step's compute and update on each path, GEMMs included; `saved`: shares of
        them that `fused` saves of `eager`, of `primitive`, and of `primitive` with attention as
        one kernel.
    """
    rank = max(eager["ranks"], key=lambda one: one["compute_seconds"])["rank"]
    own, other = (
        [r for r in found["rows"] if r["rank"] == rank and r["kind"] != "gemm"]
        for found in (eager, fused)
    )
    sums = {"primitive": _sums(own, True), "eager": _sums(own), "fused": _sums(other)}
    names = dict.fromkeys(name for path in PATHS for name in sums[path])
    rows: list[dict[str, Any]] = [
        {"module": name, **{path: sums[path][name] for path in PATHS}} for name in names
    ]
    rows.sort(key=lambda row: -row["primitive"]["bytes"])
    seconds = _step_seconds(eager, fused, rank, sums)
    scores = sum(
        row["primitive"]["seconds"] - row["eager"]["seconds"]
        for row in rows
        if row["module"].endswith("Attend")
    )
    least, most = seconds["fused"], seconds["primitive"]
    return {
        "gpu": eager["gpu"],
        "rank": rank,
        "rows": rows,
        "seconds": seconds,
        "saved": {
            "eager": 1 - least / seconds["eager"],
            "primitive": 1 - least / most,
            "primitive_without_scores": 1 - least / (most - scores),
        },
    }


def _sums(rows: Iterable[Row], primitive: bool = False) -> dict[str, dict[str, float]]:
    """Name of a row -> its operators, bytes and seconds."""
    found: dict[str, dict[str, float]] = defaultdict(
        lambda: {"operators": 0, "bytes": 0, "seconds": 0.0}
    )
    for row in rows:
        own = found[_name(row)]
        own["operators"] += row["primitives"] if primitive else row["count"]
        own["bytes"] += row["primitive_bytes"] if primitive else _bytes(row)
        own["seconds"] += row["primitive_seconds"] if primitive else row["seconds"]
    return found


def _name(row: Row) -> str:
    return row["module"].removeprefix("Fused") or OUTSIDE.get(row["phase"], GRADIENTS)


def _bytes(row: Row) -> int:
    return int(row["bytes_read"] + row["bytes_written"])


def _step_seconds(
    eager: Mapping[str, Any], fused: Mapping[str, Any], rank: int, sums: Mapping[str, Any]
) -> dict[str, float]:
    """Compute and update of a rank on each path."""
    found = {}
    for path, notes in (("eager", eager), ("fused", fused)):
        (own,) = (one for one in notes["ranks"] if one["rank"] == rank)
        found[path] = own["compute_seconds"] + own["optimizer_seconds"]
    more = sum(one["seconds"] for one in sums["primitive"].values()) - sum(
        one["seconds"] for one in sums["eager"].values()
    )
    return {"primitive": found["eager"] + more, **found}
