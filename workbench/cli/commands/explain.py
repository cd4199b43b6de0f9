"""The command `explain`: what a plan costs to train, what binds it, what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import Json, emit, planned
from workbench.cli.terminal import Grid
from workbench.plan.schema import Plan
from workbench.planner.explain.explanation import HEADS, cells
from workbench.planner.explain.number_words import days
from workbench.planner.explain.plan_figures import Effect
from workbench.planner.training_cost import Cost
from workbench.units import count_text, digits

Tokens = Annotated[
    float | None,
    typer.Option("--tokens", help="Tokens to train on, e.g. 2e12; default 20 a parameter."),
]
Price = Annotated[
    float | None, typer.Option("--price", help="USD an hour of one card; default its list price.")
]


@planned
def explain(plan: Plan, tokens: Tokens = None, price: Price = None, json: Json = False) -> None:
    """Why a plan costs what it costs: money and energy, what binds it, what makes it fit, what each
    change does.
    """
    found = verbs.explain(
        plan, tokens=tokens, price=price
    )  # not complete: rules must be free to follow a fix
    words = Text(f"{found.reasons.binding.memory}\n{found.reasons.binding.time}\n")
    effects = (_effects(title, rows) for title, rows in found.tables())
    emit(json, found.to_json(), _cost(found.name, found.cost), words, *effects)


def _cost(name: str, cost: Cost) -> Grid:
    """The cost, one figure a row; what is missing says why."""
    built = tables.table(f"{name}, cost ({cost.source})", ("what", "value"), ("value",))
    built.add_row("tokens a second", count_text(cost.tokens_per_second))
    built.add_row(f"time to {count_text(cost.tokens)} tokens ({cost.tokens_from})", days(cost.days))
    built.add_row("card-hours", count_text(cost.gpu_hours))
    if cost.dollars is not None:
        built.add_row(
            f"money, at ${cost.price_per_hour:g} a card-hour ({cost.price_source})",
            f"${cost.dollars:,.0f}",
        )
    if cost.kwh is not None:
        built.add_row(
            f"energy, at {digits(cost.watts or 0)} W a card with its host and site",
            f"{cost.kwh:,.0f} kWh",
        )
    for reason in cost.missing:
        built.add_row(reason, "–")
    return built


def _effects(title: str, rows: Sequence[Effect]) -> Grid:
    built = tables.table(title, HEADS, HEADS[1:], ("tokens/s", "longer by"))
    for effect in rows:
        built.add_row(*cells(effect))
    return built
