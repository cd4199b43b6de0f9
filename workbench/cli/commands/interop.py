"""Commands about configurations of other software: read one as a plan, write a plan as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import Gpu, Gpus, Json, Model, PlanOutput, Set, emit, planned
from workbench.cli.output_files import write_whole
from workbench.cli.terminal import Grid
from workbench.errors import refuse
from workbench.interop import FORMATS, TITLES, VERSIONS, KeyNote
from workbench.plan.plan_data import assignments
from workbench.plan.schema import Plan


def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ds_config.json, Megatron-LM arguments or script, "
            "torchtitan TOML or Python, accelerate or gpt-neox YAML, "
            "arguments of Hugging Face's Trainer or TRL, LLaMA-Factory or axolotl YAML.",
        ),
    ],
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=1,
            help="Vocabulary of the model, where Megatron-LM arguments leave it to the tokenizer.",
        ),
    ] = None,
    sets: Set = None,
    output: PlanOutput = None,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient", help="List keys that the format does not have, instead of refusing them."
        ),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="NAME",
            help="Which of several configurations in a torchtitan Python file.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    found = verbs.import_config(
        file,
        model=model,
        gpu=gpu,
        gpus=gpus,
        vocab_size=vocab_size,
        set=assignments(sets or []),
        lenient=lenient,
        config=config,
    )
    full, text = found.plan.resolve(), found.plan.to_yaml()
    if output is not None:
        write_whole(output, text)
    data: dict[str, Any] = {
        "format": found.format,
        "plan": found.plan.model_dump(exclude_unset=True),
        "sizes": full.sizes,
        "world_size": full.world_size,
        "translated": found.translated,
        "untranslated": _rows(found.untranslated),
        "assumed": _rows(found.assumed),
        "ignored": _rows(found.ignored),
        "unknown": _rows(found.unknown),
    }
    if output is not None:
        data["path"] = str(output)
    shown = None if output else text.rstrip()
    emit(
        json,
        data,
        lambda: [
            f"{file}: {TITLES[found.format]}",
            tables.plan_table(full),
            *(notes(*table) for table in found.tables()),
            shown,
        ],
    )


@planned
def translate(
    plan: Plan,
    to: Annotated[
        str, typer.Option("--as", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")
    ],
    framework_version: Annotated[
        str | None,
        typer.Option(
            "--framework-version",
            metavar="VERSION",
            help="Release of torchtitan that is to read it: "
            f"{', '.join(VERSIONS['torchtitan'])} (default).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the configuration here.")
    ] = None,
    json: Json = False,
) -> None:
    if to not in FORMATS:
        raise refuse("--as", f"is '{to}'; legal: {', '.join(FORMATS)}")
    found = verbs.translate(plan, to, framework_version)
    if output is not None:
        write_whole(output, found.text)
    data: dict[str, Any] = {
        "format": to,
        "text": found.text,
        "untranslated": _rows(found.untranslated),
    }
    if output is not None:
        data["path"] = str(output)
    title = f"Not translated: what the plan says and {TITLES[to]} cannot"
    shown = None if output else found.text.rstrip()
    emit(json, data, lambda: [shown, notes(title, "field", found.untranslated)])


def notes(title: str, what: str, found: Sequence[KeyNote]) -> Grid | str:
    """Notes as a table; a line that says so where there are none."""
    if not found:
        return f"{title}: nothing"
    built = tables.table(title, (what, "value", "why"))
    for note in found:
        built.add_row(note.field, note.value, note.why)
    return built


def _rows(found: Sequence[KeyNote]) -> list[dict[str, Any]]:
    return [asdict(note) for note in found]
