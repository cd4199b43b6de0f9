"""What the commands share: how a plan is named, how an answer is printed."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from workbench.cli.terminal import Grid, as_text, console
from workbench.errors import refuse
from workbench.plan.plan_data import assignments
from workbench.plan.schema import Plan, build_plan, written_fields

PlanFile = Annotated[
    Path | None, typer.Argument(metavar="[PLAN]", help="Plan file; or choose with the options.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="Model of `workbench models`, or a config.json.")
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help="Card of `workbench gpus`; local: what is attached.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Cards, or CPU ranks, of the whole job.")]
Strategy = Annotated[
    str | None, typer.Option("--strategy", help="Preset of `workbench strategies`.")
]
NoStrategy = Annotated[str | None, typer.Option("--strategy", hidden=True)]
"""Of a command that looks for the strategy: refused with what to give instead, and not offered."""
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any field by dotted path; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Run a model that is given as Python: code of whoever wrote it."
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root", file_okay=False, help="Folder of runs; default $WORKBENCH_RUNS, else ./runs."
    ),
]


def chosen(
    file: Path | None,
    model: str | None,
    gpu: str | None,
    gpus: int | None,
    strategy: str | None,
    sets: list[str] | None,
    *,
    legal: bool = True,
) -> Plan:
    """The plan that the options mean: the file's, or one built from the choices; options override
    the file.

    A card, a number of cards or a strategy given here brings its own settings: those that the file
    had for another go. Raises `PlanError` for what is illegal; with `legal` off only for what
    cannot be read.
    """
    if file is None and model is None:
        raise refuse("PLAN", "give a plan file, or --model (and --gpu, --gpus, --strategy)")
    plan = (
        Plan.load(file)
        if file
        else build_plan({"model": model, "cluster": {"gpu": "local", "gpus": 1}})
    )
    changes: dict[str, Any] = {} if model is None else {"model": model}
    if gpu is not None or gpus is not None:
        changes["cluster"] = _cluster(written_fields(plan)["cluster"], gpu, gpus)
    if strategy is not None:
        changes["strategy"] = {"preset": strategy}
    plan = plan.replace(**_beside(changes, assignments(sets or [])))
    if legal:
        plan.resolve()
    return plan


OPTIONS = {"model": "--model", "cluster": "--gpu and --gpus", "strategy": "--strategy"}
"""Field of a plan -> the options that give it whole."""


def _beside(changes: dict[str, Any], sets: dict[str, Any]) -> dict[str, Any]:
    """Both, where they do not give the same field. Raises `PlanError` naming both where they do."""
    for field in changes.keys() & sets.keys():
        raise refuse(
            "--set",
            f"{field}=... gives all of `{field}`, and so does {OPTIONS[field]}; legal: one of the "
            f"two, or --set for a field below it, as `workbench plan --complete` lists them",
        )
    return changes | sets


def _cluster(written: dict[str, Any], gpu: str | None, gpus: int | None) -> dict[str, Any]:
    kept = {"fabric": written["fabric"]} if gpu is None and "fabric" in written else {}
    return {
        "gpu": written["gpu"] if gpu is None else gpu,
        "gpus": written["gpus"] if gpus is None else gpus,
        **kept,
    }


_CHOICES = {
    "file": PlanFile,
    "model": Model,
    "gpu": Gpu,
    "gpus": Gpus,
    "strategy": Strategy,
    "sets": Set,
}
"""Options that name a plan, by the arguments of `chosen`."""


def planned(command: Callable[..., None]) -> Callable[..., None]:
    """`command(plan, ...)` as a command that is given a plan file, or the choices that make a
    plan.
    """
    return _taking(_CHOICES, chosen, command)


def outlined(command: Callable[..., None]) -> Callable[..., None]:
    """As `planned`, for a command that finds a strategy itself: none is asked for, the file's may
    be illegal.
    """

    def outline(file: Path | None, strategy: str | None, **choices: Any) -> Plan:
        if strategy is not None:
            raise refuse(
                "--strategy",
                f"is '{strategy}', but this command looks for the strategy; legal: --where for "
                f"what it must keep, e.g. --where strategy.data.zero=3, or `estimate`",
            )
        given = "strategy" in assignments(choices["sets"] or [])
        return chosen(
            file, strategy="ddp" if file is None and not given else None, legal=False, **choices
        )

    return _taking({**_CHOICES, "strategy": NoStrategy}, outline, command)


def _taking(
    choices: dict[str, Any], plan_of: Callable[..., Plan], command: Callable[..., None]
) -> Callable[..., None]:
    """`command` with its first parameter, the plan, replaced in its signature by the choices that
    make one.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    asked = [
        inspect.Parameter(name, keyword, default=None, annotation=kind)
        for name, kind in choices.items()
    ]
    own = [
        p.replace(kind=keyword)
        for p in inspect.signature(command, eval_str=True).parameters.values()
    ][1:]

    @functools.wraps(command)
    def taking(**given: Any) -> None:
        command(plan_of(**{name: given.pop(name) for name in choices}), **given)

    signature = inspect.Signature(asked + own)
    taking.__dict__["__signature__"] = signature
    taking.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return taking


def emit(as_json: bool, data: Any, *shown: Grid | Text | None) -> None:
    """Print the answer: `data` as one JSON document, or what is `shown` as tables for people."""
    if as_json:
        sys.stdout.write(json.dumps(finite(data), indent=2, default=str) + "\n")
        sys.stdout.flush()
        return
    screen = console()
    for part in shown:
        if isinstance(part, Text):
            screen.print(as_text(part), soft_wrap=True)
        elif part is not None:
            screen.print(part)


def finite(data: Any) -> Any:
    """`data` with numbers that JSON cannot hold (infinite, NaN) as null."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
