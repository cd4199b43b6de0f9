"""The command `kernels`: the fused operators, where each runs, what it takes of a GPU, and how fast
it was measured.
"""

from __future__ import annotations

import json as encoding
from collections.abc import Iterable
from math import prod
from typing import Any

from workbench import data_files
from workbench.cli import tables
from workbench.cli.options import Json, emit
from workbench.cli.terminal import Grid
from workbench.costmodel.compute.kernel_benchmarks import kernel_benchmarks
from workbench.errors import refuse
from workbench.units import digits

FILE = "data/kernels.json"
PEERS = ("eager", "compiled", "compiled_chunked", "liger")
"""What the fused operator is measured against."""


def kernels(json: Json = False) -> None:
    found = read_kernel_table()
    rows = [
        {**fact, "ahead": ahead(found, fact["name"]), "measured": list(measured_rows(fact["name"]))}
        for fact in found["kernels"]
    ]
    data = {"triton": found["triton"], "kernels": rows}
    emit(json, data, lambda: [overview(rows), compiled(rows, found["triton"]), speeds(rows)])


def read_kernel_table() -> dict[str, Any]:
    """The table of kernels. Raises `PlanError` where it is missing or broken."""
    path = data_files.assets() / FILE
    try:
        table: dict[str, Any] = encoding.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse("", f"{path} cannot be read ({error}); reinstall workbench") from None
    return table


def ahead(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The worst of the operator's cases on each architecture."""
    rows = [row for row in table["ahead"] if row["kernel"] == name]
    return [
        _worst(sm, [row for row in rows if row["sm"] == sm])
        for sm in sorted({row["sm"] for row in rows})
    ]


def _worst(sm: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    loads = all(row["vector_loads"] for row in rows if row["streams"] != "nothing")
    stores = all(row["vector_stores"] for row in rows if row["streams"] == "in and out")
    most = {name: max(row[name] for row in rows) for name in ("registers", "spills", "shared")}
    return {"sm": sm, **most, "vectorised": loads and stores, "cases": len(rows)}


def measured_rows(name: str) -> Iterable[dict[str, Any]]:
    """The operator in each benchmark there is, at its largest shape, all passes together, case by
    case.

    `over` is the time of each peer over ours; `share_of_copy` is the least of the passes, null
    where none has one.
    """
    for bench in kernel_benchmarks():
        rows = [
            row
            for row in (*bench.get("kernels", ()), *bench.get("linear_cross_entropy", ()))
            if row["kernel"] == name
        ]
        for case in dict.fromkeys(row.get("case", "") for row in rows):
            own = [row for row in rows if row.get("case", "") == case]
            shape, dtype = max(
                ((tuple(row["shape"]), row["dtype"]) for row in own), key=lambda one: prod(one[0])
            )
            passes = [row for row in own if (tuple(row["shape"]), row["dtype"]) == (shape, dtype)]
            where = {name: bench[name] for name in ("device", "kind", "date", "versions")}
            shares = [
                row["share_of_copy"] for row in passes if row.get("share_of_copy") is not None
            ]
            yield {
                **where,
                "case": case,
                "shape": list(shape),
                "dtype": dtype,
                "over": _over(passes),
                "share_of_copy": min(shares, default=None),
            }


def _over(passes: list[dict[str, Any]]) -> dict[str, float | None]:
    ours = sum(row["seconds"]["fused"] for row in passes)
    theirs = {peer: [row["seconds"].get(peer) for row in passes] for peer in PEERS}
    return {peer: None if None in own else sum(own) / ours for peer, own in theirs.items()}


def overview(rows: list[dict[str, Any]]) -> Grid:
    """What there is, where it runs, on what it was measured."""
    built = tables.table(
        "Fused kernels",
        ("kernel", "computes", "on a GPU", "on a CPU", "reference", "measured"),
        optional=("reference", "measured", "computes"),
    )
    for row in rows:
        devices = list(dict.fromkeys(one["device"] for one in row["measured"])) or ["not measured"]
        if row["measured"] and not any(one["kind"] == "cuda" for one in row["measured"]):
            devices.append("GPU: not measured")
        reference = row["reference"].removeprefix("workbench.kernels.")
        built.add_row(
            row["name"], row["title"], row["gpu"], row["cpu"], reference, ", ".join(devices)
        )
    return built


def compiled(rows: list[dict[str, Any]], triton: str) -> Grid:
    """What each takes of a GPU: the worst of its cases."""
    heads = (
        "kernel",
        "architecture",
        "registers",
        "spilled bytes",
        "shared bytes",
        "16-byte access",
        "cases",
    )
    built = tables.table(
        f"Compiled ahead of time by Triton {triton}, the worst of all cases",
        heads,
        heads[2:5] + heads[6:],
        ("cases", "architecture"),
    )
    for row in rows:
        for one in row["ahead"]:
            figures = (str(one[name]) for name in ("registers", "spills", "shared"))
            wide = "yes" if one["vectorised"] else "NO"
            built.add_row(row["name"], f"sm_{one['sm']}", *figures, wide, str(one["cases"]))
    return built


def speeds(rows: list[dict[str, Any]]) -> Grid | None:
    """How many times as fast as each peer it was measured; None where nothing was."""
    heads = ("kernel", "on", "case", *(peer.replace("_", " ") for peer in PEERS), "of a copy")
    built = tables.table(
        "Measured: times the speed of each, and share of the bandwidth of a copy",
        heads,
        heads[3:],
        ("on",),
    )
    for name, one in ((row["name"], one) for row in rows for one in row["measured"]):
        what = " ".join(
            filter(None, (one["case"], one["dtype"], " x ".join(map(str, one["shape"]))))
        )
        ratios = (
            "–" if one["over"][peer] is None else f"{digits(one['over'][peer])} x" for peer in PEERS
        )
        share = "–" if one["share_of_copy"] is None else f"{one['share_of_copy']:.0%}"
        built.add_row(name, f"{one['device']}, {one['date']}", what, *ratios, share)
    return built if built.rows else None
