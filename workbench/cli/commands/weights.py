"""The command about weights alone: for other software, and to start from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from workbench import verbs
from workbench.cli.options import Json, emit
from workbench.cli.progress import LINE_SECONDS, Status
from workbench.units import bytes_text


def weights(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a run: its latest one.")
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder to write into.")],
    json: Json = False,
) -> None:
    last_line = 0.0
    with Status("reading") as status:

        def progress(done: int, of: int, what: str) -> None:
            nonlocal last_line
            if sys.stderr.isatty() or time.monotonic() - last_line > LINE_SECONDS:
                last_line = time.monotonic()
                status(f"{what}, {done / max(1, of):.0%} of {bytes_text(of)}")

        found = verbs.weights(source, to, progress)
    words = f"{found['parameters']:,} parameters in {found['tensors']} tensors of {found['dtype']}"
    use = f"a plan starts from them with --set model={to} --set checkpoint.load={to}"
    size = bytes_text(found["bytes"])
    emit(json, found, lambda: [f"{words}, {size}, written to {to}; {use}"])
