"""The command `search`: the best strategies for a model on given cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from workbench import verbs
from workbench.cli import tables
from workbench.cli.files import write_whole
from workbench.cli.options import Json, emit, outlined
from workbench.cli.progress import waiting
from workbench.plan.errors import refuse
from workbench.plan.schema import Plan
from workbench.planner.search import OBJECTIVES, Candidate, SearchResult
from workbench.planner.search.search import GIB, short

SHOWN_OF_FRONT = 12

Wanted = Annotated[str, typer.Option("--objective", help=f"What to make least: {', '.join(OBJECTIVES)}.")]
Top = Annotated[int, typer.Option("--top", help="How many to show.")]
Size = Annotated[str, typer.Option("--space", help="default: the usual choices; wide: millions of plans.")]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Condition, e.g. strategy.tensor.size<=8, peak_gib<60; repeatable.")
]
Deadline = Annotated[float | None, typer.Option("--deadline", help="Days in which --tokens must be trained.")]
Tokens = Annotated[float | None, typer.Option("--tokens", help="Tokens to train, for --deadline; e.g. 2e12.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan here.")]


@outlined
def search(
    plan: Plan,
    objective: Wanted = "time",
    top: Top = 10,
    space: Size = "default",
    where: Where = None,
    deadline: Deadline = None,
    tokens: Tokens = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """The best strategies for a model on given cards: every legal plan of a space, by time, cost, energy or cards."""
    with waiting("searching"):
        found = verbs.search(
            plan, objective, space=space, top=top, where=where or (), deadline_days=deadline, tokens=tokens
        )
    if output is not None:
        if not found.top:
            raise refuse("--output", f"nothing to write: {found.empty}")
        write_whole(output, found.top[0].plan.to_yaml())
    shown = [_table(f"best by {found.objective} (estimated)", found.top), _front(found)] if found.top else []
    emit(json, found.to_json(), *shown, Text(told_of(found)))


def told_of(found: SearchResult) -> str:
    """How much was searched, and why nothing was found where nothing was."""
    rate = f"{found.candidates:,} legal plans in {found.seconds:.2f} s ({found.rate / 1e6:.1f} million a second)"
    return f"{rate}, {found.feasible:,} meet every condition" + (f"\n{found.empty}" if found.empty else "")


def _front(found: SearchResult) -> Table:
    """The Pareto front, thinned evenly where it is long."""
    step = -(-len(found.pareto) // SHOWN_OF_FRONT) or 1
    return _table("less memory for more time: none of these is beaten in both (estimated)", found.pareto[::step])


def _table(title: str, rows: Sequence[Candidate]) -> Table:
    built = tables.table(
        title, ("step", "peak", "tokens/s", "cards", "strategy"), ("step", "peak", "tokens/s", "cards")
    )
    for one in rows:
        training = one.plan.training
        rate = training.global_batch * training.sequence_length / one.seconds
        numbers = (f"{one.seconds:.3f} s", f"{one.peak_bytes / GIB:.1f} GiB", f"{rate:,.0f}", str(one.plan.world_size))
        built.add_row(*numbers, short(one.plan))
    return built
