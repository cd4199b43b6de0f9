"""The command about this machine's speed: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import Json, Measurement, MeasuringSeconds, Root, emit
from workbench.cli.progress import SecondsBar
from workbench.cli.terminal import Grid
from workbench.costmodel.rates.measured_curves import MeasuredCurves
from workbench.machine.calibration_file import KINDS, Calibration, Scale

DEFAULT = Path("calibration.yaml")
LARGE = 2**24
"""Bytes of the stream and the message whose rates are shown."""


def calibrate(
    output: Measurement = DEFAULT,
    seconds: MeasuringSeconds = 80.0,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="RUN", help="Correct it from a finished run instead; repeatable."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    with SecondsBar(seconds) as bar:
        found = verbs.calibrate(output, seconds=seconds, runs=source or (), root=root, progress=bar)
    use = f"{output} written; a plan uses it with --set cluster.calibration={output}"
    emit(
        json,
        {"path": str(output), **_answer(found)},
        lambda: [_table(found), _doubts(found), _fitted(found.scale), use],
    )


def _answer(found: Calibration) -> dict[str, Any]:
    """The file's head, and its main figures by number of ranks that work at once; all measured."""
    scale = found.scale.model_dump() if found.scale else None
    return {
        "source": "measured",
        "machine": found.machine.model_dump(),
        "ranks": _figures(found),
        "scale": scale,
        "conditions": found.conditions.model_dump() if found.conditions else None,
        "doubts": [doubt.model_dump() for doubt in found.doubts],
    }


def _figures(found: Calibration) -> list[dict[str, Any]]:
    return [
        _of_ranks(MeasuredCurves(found, ranks))
        for ranks in sorted({g.ranks for g in found.gemm} | {c.ranks for c in found.collectives})
    ]


def _of_ranks(curves: MeasuredCurves) -> dict[str, Any]:
    dtypes = sorted({g.dtype for g in curves.calibration.gemm}, reverse=True)
    kinds = [
        kind
        for kind in KINDS
        if curves.ranks > 1 and any(c.kind == kind for c in curves.calibration.collectives)
    ]
    lines = {kind: curves.alpha_beta(kind, curves.ranks) for kind in kinds}
    return {
        "ranks": curves.ranks,
        "gflops": {dtype: curves.gemm_fit(dtype).rate / 1e9 for dtype in dtypes},
        "memory_gbs": float(curves.memory_rate(LARGE)) / 1e9,
        "host_optimizer_gbs": _gbs(curves.host_optimizer_rate()),
        "host": curves.host.model_dump(exclude={"ranks"}),
        "collectives": {
            k: {"alpha_us": a * 1e6, "beta_gbs": 1e-9 / b if b else None}
            for k, (a, b) in lines.items()
        },
    }


def _gbs(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def _table(found: Calibration) -> Grid:
    machine = found.machine
    title = (
        f"{machine.title}, {machine.backend}, torch {machine.versions.get('torch', '?')}, "
        f"measured {machine.date}"
    )
    rows = _figures(found)
    counts = [str(row["ranks"]) for row in rows]
    table = tables.table(title, ["each rank, of so many at once", *counts], counts)
    for dtype in rows[0]["gflops"]:
        table.add_row(f"GEMM, {dtype}", *(f"{row['gflops'][dtype]:,.0f} GFLOP/s" for row in rows))
    table.add_row("streams of 16 MiB", *(f"{row['memory_gbs']:.1f} GB/s" for row in rows))
    if any(row["host_optimizer_gbs"] for row in rows):
        stepped = (row["host_optimizer_gbs"] for row in rows)
        table.add_row(
            "optimizer in host memory", *("-" if x is None else f"{x:.1f} GB/s" for x in stepped)
        )
    for name, words in (
        ("operator_us", "an operator"),
        ("autograd_us", "with its backward"),
        ("layer_us", "a layer"),
        ("microbatch_us", "a microbatch"),
        ("step_us", "a training step"),
    ):
        table.add_row(f"host, {words}", *(f"{row['host'][name]:,.1f} us" for row in rows))
    for kind in KINDS:
        if any(kind in row["collectives"] for row in rows):
            table.add_row(
                kind.replace("_", "-"), *(_line(row["collectives"].get(kind)) for row in rows)
            )
    return table


def _line(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    rate = "" if figures["beta_gbs"] is None else f", {figures['beta_gbs']:.2f} GB/s"
    return f"{figures['alpha_us']:,.0f} us{rate}"


def _doubts(found: Calibration) -> str | None:
    """How busy the machine was, and which figures cannot be trusted."""
    busy, lines = found.conditions, []
    if busy is not None:
        load = f"load average {busy.load_average:g} on {busy.cpus} CPUs"
        lines.append(f"measured at {load}, {busy.free_memory_gib:g} GiB free")
    lines += [
        f"{'refused' if doubt.refused else 'not steady'}: {doubt.point}, {doubt.ranks} ranks at "
        f"once: {doubt.why}"
        for doubt in found.doubts
    ]
    return "\n".join(lines) or None


def _fitted(scale: Scale | None) -> str | None:
    if scale is None or scale.error_before is None or scale.error_after is None:
        return None
    factors = (
        f"compute x {scale.compute:.3f}, communication x {scale.communication:.3f}, "
        f"{scale.fixed_ms:+.2f} ms a step"
    )
    runs = f"fitted to {', '.join(scale.runs)}: {factors}"
    return (
        f"{runs}\nerror of the estimate {scale.error_before:.1%} before, {scale.error_after:.1%} "
        f"after"
    )
