"""Tables of the operators that a rehearsal counted, and of their sum beside the estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.cli.tables import table
from workbench.cli.terminal import Grid
from workbench.planner.explain.kernel_fusion import PATHS
from workbench.units import bytes_text, count_text, flops_text, seconds_text

LIMIT = 24
"""Operators that a table shows; `--json` has all."""


def operator_tables(found: Mapping[str, Any]) -> list[Grid]:
    """Of a rehearsal's `notes["operators"]`: its operators on the rank that computes longest, and
    the sums of every rank.
    """
    longest = max(found["ranks"], key=lambda one: one["compute_seconds"])
    rows = [row for row in found["rows"] if row["rank"] == longest["rank"]]
    return [_operators(rows, found["gpu"], longest.get("waits_seconds", 0.0)), _sums(found)]


def _operators(rows: list[dict[str, Any]], gpu: str, waits: float) -> Grid:
    """Operators by their time on the GPU, and what it waits for its host's launches."""
    columns = ("phase", "operator", "shape", "dtype", "count", "FLOPs", "bytes")
    more = ("FLOP/B", "bound by", "time", "share")
    built = table(
        f"Operators of rank {rows[0]['rank']} in a step (rehearsed; times estimated on {gpu})",
        (*columns, *more),
        ("count", "FLOPs", "bytes", "FLOP/B", "time", "share"),
        ("dtype", "FLOPs", "FLOP/B", "bytes"),
    )
    for row in rows[:LIMIT]:
        built.add_row(
            row["phase"],
            row["operator"],
            " x ".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            str(row["count"]),
            flops_text(row["flops"]) if row["flops"] else "–",
            bytes_text(row["bytes_read"] + row["bytes_written"]),
            f"{row['intensity']:.0f}" if row["flops"] else "–",
            row["bound"],
            seconds_text(row["seconds"]),
            f"{row['share']:.1%}",
        )
    rest = rows[LIMIT:]
    if rest:
        seconds, share = (sum(row[key] for row in rest) for key in ("seconds", "share"))
        blank = [""] * 5
        built.add_row(
            "all", f"{len(rest)} others", *blank, "", "", seconds_text(seconds), f"{share:.1%}"
        )
    if waits:
        blank = [""] * 6
        built.add_row("all", "waits for the host", *blank, "launch", seconds_text(waits), "")
    return built


def _sums(found: Mapping[str, Any]) -> Grid:
    columns = ("rank", "compute, operators", "compute, estimate", "difference", "optimizer")
    built = table("Sum over operators, and the estimate", columns, columns[1:])
    for one in found["ranks"]:
        own = one.get("estimated_compute_seconds")
        built.add_row(
            str(one["rank"]),
            seconds_text(one["compute_seconds"]),
            "–" if own is None else seconds_text(own),
            "–" if own is None else f"{one['difference']:+.2%}",
            seconds_text(one["optimizer_seconds"]),
        )
    return built


def fusion_tables(found: Mapping[str, Any]) -> list[Grid | str]:
    """Of `kernel_fusion`: bytes by module on three paths, and what they are of a step."""
    heads = [f"{path}, {what}" for path in PATHS for what in ("kernels", "moved", "time")]
    built = table(
        f"Memory-bound operators of rank {found['rank']} in a step (rehearsed; times estimated on "
        f"{found['gpu']})",
        ("module", *heads),
        heads,
        [head for head in heads if head.endswith("kernels")],
    )
    for row in found["rows"]:
        cells = (row[path] for path in PATHS)
        built.add_row(row["module"], *(text for cell in cells for text in _moved(cell)))
    words = ", ".join(f"{path} {seconds_text(found['seconds'][path])}" for path in PATHS)
    saved = found["saved"]
    return [
        built,
        f"compute and update of a step, GEMMs included (estimated): {words}",
        f"fused saves {saved['eager']:.1%} of eager, {saved['primitive']:.1%} of primitive "
        f"operators, {saved['primitive_without_scores']:.1%} of those with attention as one kernel",
    ]


def _moved(cell: Mapping[str, float]) -> tuple[str, str, str]:
    return (count_text(cell["operators"]), bytes_text(cell["bytes"]), seconds_text(cell["seconds"]))
