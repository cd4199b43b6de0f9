"""`workbench lab`: JupyterLab on a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from workbench.cli.options import Json, emit
from workbench.data_files import assets
from workbench.errors import refuse
from workbench.runs.launch.parent_death import python_module

ALLOW_ROOT = "--allow-root"
OFFLINE_PAGES = tuple(
    f"--HTMLExporter.{name}_url="
    for name in ("mathjax", "require_js", "mermaid_js", "mermaid_layout_elk_js")
)
"""Options under which a page that is saved from a notebook fetches no script from a content
delivery network.
"""
QUIET = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    *OFFLINE_PAGES,
)
"""Nothing is asked of the network, and no pop-up stands over the first page to ask whether it may
be.
"""


def lab(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NOTEBOOK] [-- OPTION...]",
            help="Notebook or folder, default the quickstart, else here; after `--` options of "
            "JupyterLab itself.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser window.")
    ] = True,
    port: Annotated[int | None, typer.Option("--port", help="Port of JupyterLab.")] = None,
    json: Json = False,
) -> None:
    given = words or []
    notebooks = [word for word in given[:1] if not word.startswith("-")]
    options = given[len(notebooks) :]
    command = [*python_module("jupyterlab"), *_opening(_target(notebooks)), *QUIET]
    command += [] if browser else ["--no-browser"]
    command += [f"--port={port}"] if port else []
    command += options
    if json:
        emit(json, {"command": command})
        return
    if os.geteuid() == 0 and not any(
        option.startswith((ALLOW_ROOT, "--ServerApp.allow_root")) for option in options
    ):
        line = " ".join(["workbench lab", *notebooks, "--", *options, ALLOW_ROOT])
        raise refuse(
            "lab",
            f"JupyterLab does not run as root unless allowed; become another user, or: {line}",
        )
    os.execv(command[0], command)


def _target(notebooks: list[str]) -> Path:
    """What to open. Raises `PlanError` where it is not there."""
    quickstart = assets() / "notebooks" / "00_quickstart.ipynb"
    target = Path(notebooks[0]) if notebooks else quickstart if quickstart.exists() else Path.cwd()
    if not target.exists():
        raise refuse("lab", f"'{target}' does not exist; legal: a notebook, or a folder")
    return target.absolute()


def _opening(target: Path) -> list[str]:
    """JupyterLab's options that open `target`, from the address that it prints too."""
    if target.is_dir():
        return [f"--ServerApp.root_dir={target}"]
    return [
        f"--ServerApp.root_dir={target.parent}",
        f"--LabApp.default_url=/lab/tree/{quote(target.name)}",
    ]
