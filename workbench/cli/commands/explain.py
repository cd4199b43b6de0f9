"""The commands `explain`, what a plan costs, what binds it, what changes it, and `states`, how many
GPUs hold a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from workbench import verbs
from workbench.cli import completion, tables
from workbench.cli.options import Json, Risk, Set, emit, planned
from workbench.cli.terminal import Grid
from workbench.errors import refuse
from workbench.plan.plan_data import assignments
from workbench.plan.schema import Plan
from workbench.planner.explain.asked_table import AskedTable
from workbench.planner.explain.explanation import EFFECT_HEADS, Explanation, effect_cells
from workbench.planner.explain.plan_figures import ChangeEffect
from workbench.planner.states_on_gpus.states_answer import (
    PRINTED,
    STEP_HEADS,
    STEP_TITLE,
    StatesAnswer,
)
from workbench.planner.training_cost import TrainingCost
from workbench.units import count_text, days_text, digits, dollars_text

Tokens = Annotated[
    float | None,
    typer.Option("--tokens", help="Tokens to train on, e.g. 2e12; default 20 a parameter."),
]
Price = Annotated[
    float | None, typer.Option("--price", help="USD an hour of one GPU; default its list price.")
]

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help="A number of parameters (100e9, 1.4B), a model of `workbench models`, or a plan file.",
        autocompletion=completion.models_and_plans,
    ),
]
Sizes = Annotated[
    str, typer.Option("--gpu-memory", help="Printed memory of GPUs, GB, separated by commas.")
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        help="GPU of `workbench gpus` for a whole step; repeatable.",
        autocompletion=completion.gpus,
    ),
]


@planned
def explain(
    plan: Plan,
    tokens: Tokens = None,
    price: Price = None,
    risk: Risk = 0.05,
    without_each: Annotated[
        bool,
        typer.Option(
            "--without-each",
            help="Also memory without each dimension: tensor, pipeline, data, sharding, ...",
        ),
    ] = False,
    rehearse: Annotated[
        float | None,
        typer.Option(
            "--rehearse",
            metavar="SECONDS",
            help="Rehearse each of --without-each too, for so many seconds at most, e.g. 60.",
        ),
    ] = None,
    placements: Annotated[
        bool,
        typer.Option(
            "--placements", help="Also every order of the axes over nodes and racks, best first."
        ),
    ] = False,
    json: Json = False,
) -> None:
    found = verbs.explain(
        plan,  # not complete: rules must be free to follow a fix
        tokens=tokens,
        price=price,
        risk=risk,
        without_each=without_each,
        rehearse_seconds=rehearse,
        placements=placements,
    )
    emit(json, found.to_json(), lambda: _shown(found))


def _shown(found: Explanation) -> list[Grid | str]:
    cannot = [f"{words}\n" for words in found.reasons.cannot]
    effects = [_effects(title, rows) for title, rows in found.tables()]
    words = "\n".join((found.step_line, *found.sentences, ""))
    asked = [part for table in found.asked for part in _asked(table)]
    return [_cost(found.name, found.cost), *cannot, words, *effects, *asked]


def _asked(table: AskedTable) -> list[Grid | str]:
    built = tables.table(table.title, table.heads, table.heads[1:], table.optional)
    for row in table.rows:
        built.add_row(*row)
    return [built, "\n".join((*table.notes, ""))]


def _cost(name: str, cost: TrainingCost) -> Grid:
    """The cost, one figure a row; what is missing says why."""
    built = tables.table(f"{name}, cost ({cost.source_words})", ("what", "value"), ("value",))
    built.add_row("tokens/s", count_text(cost.tokens_per_second))
    built.add_row(
        f"time to {count_text(cost.tokens)} tokens ({cost.tokens_from})", days_text(cost.days)
    )
    built.add_row("GPU-hours", count_text(cost.gpu_hours))
    if cost.dollars is not None:
        built.add_row(
            f"cost, at ${cost.price_per_hour:g} a GPU-hour ({cost.price_source})",
            dollars_text(cost.dollars),
        )
    if cost.kwh is not None:
        built.add_row(
            f"energy, at {digits(cost.watts or 0)} W a GPU with its host and site",
            f"{digits(cost.kwh)} kWh",
        )
    for reason in cost.missing:
        built.add_row(reason, "–")
    return built


def _effects(title: str, rows: Sequence[ChangeEffect]) -> Grid:
    built = tables.table(title, EFFECT_HEADS, EFFECT_HEADS[1:], ("tokens/s", "Δ step time"))
    for effect in rows:
        built.add_row(*effect_cells(effect))
    return built


def states(
    subject: Subject,
    gpu_memory: Sizes = "16,32,40,80",
    gpu: Gpus = None,
    set: Set = None,
    json: Json = False,
) -> None:
    found = verbs.states(
        subject, gpu_memory=_sizes(gpu_memory), gpus=gpu or (), set=assignments(set or [])
    )
    emit(json, found.to_json(), lambda: _shown_states(found))


def _sizes(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise refuse(
            "--gpu-memory", f"is '{text}'; legal: sizes in GB separated by commas, e.g. 16,32"
        ) from None


def _shown_states(found: StatesAnswer) -> list[Grid | str]:
    held = tables.table(found.title, found.heads, found.heads[1:-1], ("source", "terms"))
    for row in found.states_cells():
        held.add_row(*row)
    step = tables.table(STEP_TITLE, STEP_HEADS, STEP_HEADS[3:], ("precision",))
    for row in found.step_cells():
        step.add_row(*row)
    return [
        held,
        "\n".join((PRINTED, *found.divisions(), "")),
        step,
        "\n".join(found.below_steps()),
    ]
