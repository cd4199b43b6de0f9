"""What the commands share: how a plan is named, how an answer is printed."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import completion
from workbench.errors import PlanError, refuse
from workbench.plan.plan_data import assignments
from workbench.plan.schema import Plan, build_plan, written_fields

if TYPE_CHECKING:
    from workbench.cli.terminal import Grid

PlanFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PLAN]",
        help="Plan file; or choose with the options.",
        autocompletion=completion.plan_files,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model of `workbench models`, a config.json or layers.csv.",
        autocompletion=completion.models,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="GPU of `workbench gpus`; local: what is attached.",
        autocompletion=completion.gpus,
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs, or CPU ranks, of the whole job.")]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy", help="Preset of `workbench strategies`.", autocompletion=completion.strategies
    ),
]
NoStrategy = Annotated[str | None, typer.Option("--strategy", hidden=True)]
"""Option of a command that searches the strategy: hidden, and refused with what to give instead."""
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any field by dotted path; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")]
Risk = Annotated[
    float, typer.Option("--risk", help="Largest probability of running out of memory.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Run a model that is given as Python: code of whoever wrote it."
    ),
]
Measurement = Annotated[
    Path, typer.Option("-o", "--output", help="File to write what is measured into.")
]
MeasuringSeconds = Annotated[
    float, typer.Option("--seconds", help="How long to measure, beside preparing.")
]
PlanOutput = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the plan file here.")
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
) -> Plan:
    """The plan that the options mean: the file's, or one built from the choices; options override
    the file.

    A GPU, a number of GPUs or a strategy given here brings its own settings; those that the file
    has for another are dropped. Whether the plan is legal is for the verb to say, which resolves
    it.

    Raises:
        PlanError: The plan cannot be read.
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
    changed = plan.replace(**_merged(changes, assignments(sets or [])))
    if file:
        _say_batch(plan, changed)
    return changed


def _say_batch(plan: Plan, changed: Plan) -> None:
    """Say on stderr that a default global batch follows what the options change: step times then
    do not compare.
    """
    if "global_batch" in changed.training.model_fields_set:
        return
    try:
        before, after = (one.resolve().training.global_batch for one in (plan, changed))
    except PlanError:  # for the verb to say
        return
    if before != after:
        from workbench.cli.terminal import print_message

        print_message(
            f"training.global_batch follows the options: {before} → {after}, so compare tokens/s, "
            f"not step times; --set training.global_batch={before} holds it where that is legal"
        )


OPTIONS = {"model": "--model", "cluster": "--gpu and --gpus", "strategy": "--strategy"}
"""Field of a plan -> the options that give it whole."""


def _merged(changes: dict[str, Any], sets: dict[str, Any]) -> dict[str, Any]:
    """Both, where they do not give the same field. Raises `PlanError` naming both where they do."""
    for field in changes.keys() & sets.keys():
        raise refuse(
            "--set",
            f"{field}=... gives all of `{field}`, and so does {OPTIONS[field]}; legal: one of the "
            f"two, or --set for a field below it, as `workbench plan --complete` lists them",
        )
    return changes | sets


def _cluster(written: dict[str, Any], gpu: str | None, gpus: int | None) -> dict[str, Any]:
    fabric = {"fabric": written["fabric"]} if gpu is None and "fabric" in written else {}
    return {
        "gpu": written["gpu"] if gpu is None else gpu,
        "gpus": written["gpus"] if gpus is None else gpus,
        **fabric,
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


def plan_without_strategy(command: Callable[..., None]) -> Callable[..., None]:
    """As `planned`, for a command that searches the strategy: none is asked for, the file's may be
    illegal.
    """

    def chosen_model(file: Path | None, strategy: str | None, **choices: Any) -> Plan:
        if strategy is not None:
            raise refuse(
                "--strategy",
                f"is '{strategy}', but this command searches the strategy; legal: --where for "
                f"what it must have, e.g. --where strategy.data.zero=3, or `estimate`",
            )
        set_here = "strategy" in assignments(choices["sets"] or [])
        return chosen(file, strategy="ddp" if file is None and not set_here else None, **choices)

    return _taking({**_CHOICES, "strategy": NoStrategy}, chosen_model, command)


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


def emit(
    as_json: bool, data: Any, show: Callable[[], Iterable[Grid | str | None]] = lambda: ()
) -> None:
    """Print the answer of a command.

    Args:
        as_json: Print `data` as one JSON document, and nothing else.
        data: The answer for machines.
        show: Makes the tables and lines for people; called, and rich imported, only for them.
    """
    if as_json:
        sys.stdout.write(json.dumps(finite(data), indent=2, default=str) + "\n")
        sys.stdout.flush()
        return
    from workbench.cli.terminal import console, print_words

    screen = console()
    for part in show():
        if isinstance(part, str):
            print_words(screen, part)
        elif part is not None:
            screen.print(part)


def finite(data: Any) -> Any:
    """`data` with numbers that JSON cannot hold (infinite, NaN) as null."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
