"""The command that puts plans and runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import verbs
from workbench.cli import completion
from workbench.cli.options import Json, Root, emit
from workbench.cli.output_files import writable
from workbench.cli.progress import Status, run_to_end
from workbench.cli.tables import table
from workbench.cli.terminal import Grid
from workbench.errors import refuse
from workbench.lab.comparison.comparison_tables import TableColumn, is_text_column, text_rows
from workbench.lab.comparison.named_items import open_items
from workbench.plan.schema import Plan
from workbench.runs.launch.checked_launch import ready

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = (
    "step",
    "run",
    "first_loss",
    "steps",
    "ranks",
    "measured_allocated_bytes",
    "rehearsed_allocated_bytes",
    "estimated_allocated_bytes",
    "rehearsed_error",
    "estimated_error",
    "step_seconds_90",
    "tokens_per_second",
)
"""Columns that a narrow screen leaves out, the first first; plans of different batches compare by
the last.
"""


def compare(
    these: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Plan files, run directories, names of runs.",
            autocompletion=completion.plans_and_runs,
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a report that opens offline.")
    ] = None,
    train: Annotated[
        bool, typer.Option("--run", help="Run each plan first, one after the other.")
    ] = False,
    rehearsed: Annotated[
        bool, typer.Option("--rehearse/--no-rehearse", help="Rehearse each plan too.")
    ] = True,
    root: Root = None,
    json: Json = False,
) -> None:
    items = open_items(these, root)
    writable(html)
    if train:
        items = _runs_of(items, root)
    with Status("comparing") as status:
        found = verbs.compare(*items, rehearsed=rehearsed, progress=status)
    try:
        page = found.to_html(html) if html else None
    except OSError as error:
        raise refuse("--html", f"'{html}' cannot be written: {error.strerror or error}") from None
    data = found.to_json() | (
        {"html": str(page), "charts_left_out": found.left_out} if page else {}
    )
    report = f"report: {page}" if page else None
    left_out = "\n  ".join(["charts left out:", *found.left_out]) if found.left_out else None
    emit(
        json, data, lambda: [*(comparison_grid(*sheet) for sheet in found.tables), report, left_out]
    )


def comparison_grid(caption: str, columns: list[TableColumn], frame: pd.DataFrame) -> Grid:
    """One of the tables of a comparison."""
    heads = {name: heading for name, heading, _ in columns}
    figures = [heading for name, heading in heads.items() if not is_text_column(name)]
    built = table(
        caption, heads.values(), figures, [heads[name] for name in OPTIONAL if name in heads]
    )
    for row in text_rows(columns, frame):
        built.add_row(*(text for _, text in row))
    return built


def _runs_of(items: list[Any], root: Path | None) -> list[Any]:
    """Each plan's finished run in its place. All plans are checked before the first runs; the first
    failure ends it.
    """
    for item in items:
        if isinstance(item, Plan):
            ready(item, root=root)
    found = []
    for number, item in enumerate(items, start=1):
        if isinstance(item, Plan):
            which = f"{number} of {len(items)}: {item.resolve().name}"
            item = run_to_end(verbs.run(item, root=root), which)
        found.append(item)
    return found
