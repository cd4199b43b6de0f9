"""The command `search`: the best strategies for a model on given GPUs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import Json, Risk, emit, plan_without_strategy
from workbench.cli.output_files import write_whole
from workbench.cli.progress import LINE_SECONDS, Status
from workbench.cli.terminal import Grid
from workbench.errors import refuse
from workbench.plan.schema import Plan
from workbench.planner.methods import method_tables
from workbench.planner.methods.method_comparison import MethodComparison
from workbench.planner.search import OBJECTIVES, Candidate, SearchResult
from workbench.planner.search.results import result_tables

Wanted = Annotated[
    str, typer.Option("--objective", help=f"What to make least: {', '.join(OBJECTIVES)}.")
]
Top = Annotated[int, typer.Option("--top", help="How many to show.")]
Size = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="default, of a layer profile unequal; wide: more schedules and sharding; vast: "
        "kernels, grids, buckets too; unequal: stages cut and replicated each by itself; "
        "operators: stages, submeshes and the strategy of every operator.",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", help="Condition, e.g. strategy.tensor.size<=8, peak_gib<60; repeatable."
    ),
]
Deadline = Annotated[
    float | None, typer.Option("--deadline", help="Days in which --tokens must be trained.")
]
Tokens = Annotated[
    float | None, typer.Option("--tokens", help="Tokens to train, for days, cost and --deadline.")
]
Methods = Annotated[
    bool,
    typer.Option(
        "--methods",
        help="Of a plan with `finetune`: full, LoRA and a 4-bit base beside each other, on the "
        "fewest GPUs, at the lowest cost and in the shortest time.",
    ),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan here.")]


@plan_without_strategy
def search(
    plan: Plan,
    objective: Wanted = "time",
    top: Top = 10,
    space: Size = None,
    where: Where = None,
    deadline: Deadline = None,
    tokens: Tokens = None,
    risk: Risk = 0.05,
    methods: Methods = False,
    output: Output = None,
    json: Json = False,
) -> None:
    if methods:
        if (objective, top) != ("time", 10):
            raise refuse("--methods", "has goals of its own; legal: without --objective and --top")
        limits = {"deadline_days": deadline, "tokens": tokens, "risk": risk}
        return _methods(plan, output, json, space=space, where=where or (), **limits)
    with Status("searching") as status:
        found = verbs.search(
            plan,
            objective,
            space=space,
            top=top,
            where=where or (),
            deadline_days=deadline,
            tokens=tokens,
            risk=risk,
            progress=_at_intervals(status),
        )
    if output is not None:
        if not found.top:
            raise refuse("--output", f"nothing to write: {found.empty}")
        write_whole(output, found.top[0].plan.to_yaml())
    # For machines every plan of the front is simulated, and gets its interval.
    emit(json, found.to_json() if json else None, lambda: _shown(found))


def _methods(plan: Plan, output: Path | None, json: bool, **options: Any) -> None:
    """Methods of fine-tuning beside each other; the cheapest of all is written."""
    with Status("searching") as status:
        found = verbs.search_methods(plan, progress=_at_intervals(status), **options)
    if output is not None:
        if found.cheapest is None:
            raise refuse("--output", f"nothing to write: {found.methods[0].empty}")
        write_whole(output, found.cheapest.plan.to_yaml())
    emit(json, found.to_json() if json else None, lambda: _shown_methods(found))


def _shown_methods(found: MethodComparison) -> list[Grid | str]:
    grids: list[Grid | str] = []
    for title, heads, rows in method_tables.tables(found):
        built = tables.table(
            title, heads, [head for head in heads if head in method_tables.NUMBERS]
        )
        for row in rows:
            built.add_row(*row)
        grids.append(built)
    return [*grids, "\n".join(method_tables.notes(found))]


def _at_intervals(status: Status) -> Callable[[str], None]:
    """`status` as often as a terminal redraws, or a log wants a line; a short search has none."""
    last, pause = time.monotonic(), 0.1 if sys.stderr.isatty() else LINE_SECONDS

    def say(words: str) -> None:
        nonlocal last
        if time.monotonic() - last > pause:
            last = time.monotonic()
            status(words)

    return say


def _shown(found: SearchResult) -> list[Grid | str]:
    grids = [_table(found, title, rows) for title, rows in result_tables.search_tables(found)]
    if found.baselines:
        heads = result_tables.BASELINE_HEADS
        others = tables.table(result_tables.BASELINE_TITLE, heads, heads[1:-1])
        for one in found.baselines:
            others.add_row(*result_tables.baseline_row(one))
        grids.append(others)
    return [*grids, result_tables.search_text(found)]


def _table(found: SearchResult, title: str, rows: Sequence[Candidate]) -> Grid:
    heads = result_tables.table_heads(found)
    built = tables.table(title, heads, heads[:-1], result_tables.OPTIONAL_HEADS)
    for one in rows:
        built.add_row(*result_tables.table_row(found, one))
    return built
