"""The command on operator strategies: how each operator of a model is best split, what it costs,
and why.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import AllowCode, Json, emit, planned
from workbench.cli.output_files import write_whole
from workbench.cli.terminal import Grid
from workbench.errors import refuse
from workbench.plan.schema import Plan
from workbench.units import bytes_text, seconds_text
from workbench.untrusted_text import shown

if TYPE_CHECKING:
    from workbench.planner.autoshard import OperatorPlan


@planned
def operators(
    plan: Plan,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", help="Ranks, or a grid such as 4x8, outermost first; default all GPUs."
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GIB", help="Memory limit of a rank, GiB.")
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences", help="Sequences of a microbatch over all ranks; default the plan's."
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="dynamic_programming, recursive_programming or sharding_propagation (from the "
            "strategies that the plan names).",
        ),
    ] = "dynamic_programming",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the plan with `strategy.operators` filled in here."
        ),
    ] = None,
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    mesh = None if ranks is None else mesh_of(ranks)
    found = verbs.operators(
        plan, mesh, memory_gib=memory, sequences=sequences, mode=mode, allow_code=allow_code
    )
    data = found.to_json()
    if output is not None:
        write_whole(output, _legal_plan(plan, found, allow_code).to_yaml())
        data["path"] = str(output)
    emit(json, data, lambda: [_rows(found), _between(found), _total(found), found.reason])


def _legal_plan(plan: Plan, found: OperatorPlan, allow_code: bool) -> Plan:
    """The plan that has the strategies. Raises `PlanError` where ranks or sequences that were given
    make it one that no GPUs and batch of it allow.
    """
    from workbench.plan.rules.supported import require
    from workbench.planner.autoshard import plan_with

    written = plan_with(plan, found)
    require(written.resolve(), "estimate", allow_code)
    return written


def mesh_of(text: str) -> int | tuple[int, ...]:
    """Ranks as a number or a grid: '8' -> 8, '2x4' -> (2, 4). Raises `PlanError`."""
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,3}", text, re.ASCII):
        raise refuse(
            "--ranks", f"is {shown(text)}; legal: a number such as 8, or a grid such as 2x4"
        )
    sizes = tuple(int(word) for word in text.split("x"))
    return sizes if len(sizes) > 1 else sizes[0]


def _rows(found: OperatorPlan) -> Grid:
    columns = (
        "operator",
        "strategy",
        "split",
        "communicated",
        "time a layer",
        "memory a layer",
        "layers",
        "why",
    )
    title = f"Operators over {' x '.join(map(str, found.ranks))} ranks ({found.source})"
    built = tables.table(title, columns, columns[4:7], ("strategy", "layers"))
    for row in found.rows:
        cost = (seconds_text(row.seconds), bytes_text(row.bytes), str(row.times))
        built.add_row(row.operator, row.strategy, row.splits, row.communicated, *cost, row.reason)
    return built


def _between(found: OperatorPlan) -> Grid | None:
    if not found.redistributions:
        return None
    columns = ("from", "to", "redistributed", "time a layer", "layers")
    built = tables.table(f"Redistributions ({found.source})", columns, columns[3:])
    for row in found.redistributions:
        built.add_row(
            row.source, row.target, row.communicated, seconds_text(row.seconds), str(row.times)
        )
    return built


def _total(found: OperatorPlan) -> Grid:
    built = tables.table(f"Total ({found.source})", ("what", "value"), ("value",))
    built.add_row(
        "microbatch time, forward and backward, nothing overlapped", seconds_text(found.seconds)
    )
    built.add_row(
        "parameters, optimizer states and saved activations of a rank", bytes_text(found.bytes)
    )
    if found.peak is not None:
        built.add_row("peak memory of a rank, of the plan that has them", bytes_text(found.peak))
    if found.limit is not None:
        built.add_row("limit", bytes_text(found.limit))
    for field, value in found.changes.items():
        built.add_row(f"needs {field}", str(value))
    built.add_row("found by", found.solver)
    return built
