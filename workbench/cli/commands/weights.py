"""The command about weights alone: for other software, and to start from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from workbench import verbs
from workbench.cli.options import Json, emit
from workbench.cli.progress import LINE_SECONDS, waiting
from workbench.units import bytes_text


def weights(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a run: its latest one.")
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder to write into.")],
    json: Json = False,
) -> None:
    """Write a checkpoint's weights under Hugging Face's names; such a folder also starts a run
    (checkpoint.load).
    """
    said = 0.0
    with waiting("reading") as told:

        def progress(done: int, of: int, what: str) -> None:
            nonlocal said
            if sys.stderr.isatty() or time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                told(f"{what}, {done / max(1, of):.0%} of {bytes_text(of)}")

        found = verbs.weights(source, to, progress)
    words = f"{found['parameters']:,} parameters in {found['tensors']} tensors of {found['dtype']}"
    use = f"a plan starts from them with --set model={to} --set checkpoint.load={to}"
    emit(json, found, Text(f"{words}, {bytes_text(found['bytes'])}, written to {to}; {use}"))
