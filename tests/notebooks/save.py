"""Execute notebooks and keep what they show as pictures and tables, so that they read on GitHub.

`python -m tests.notebooks.save [NAME ...]`; default all notebooks on strategies.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
import vl_convert
from PIL import Image

from tests.lab.notebooks import executed_notebook
from tests.notebooks.strategy_notebooks import NOTEBOOKS, STRATEGY_NOTEBOOKS
from workbench.lab import palette
from workbench.lab.live.figure import VEGA_MIME, vega_config
from workbench.lab.pictures.pictures import VEGA_LITE

KEPT = ("image/png", "text/html", "text/plain")
SCALE = 1.5
"""Pixels of a picture for one of the chart."""


def save(name: str) -> None:
    """Execute a notebook in a folder of its own, and write it back with its outputs."""
    path = NOTEBOOKS / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        keep(executed_notebook(path.name, Path(folder), patch, timeout=1200), path)


def keep(notebook: Any, path: Path) -> None:
    """Write an executed notebook with what GitHub shows of its outputs."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs]
    notebook.metadata["source_sha256"] = source_digest(notebook)
    nbformat.write(notebook, path)


def kept(output: Any) -> Any:
    """An output with what GitHub shows alone: a chart as a picture, text, a table."""
    if output.output_type == "stream":
        return output
    data = dict(output.data)
    if VEGA_MIME in data:
        data = {"image/png": picture(data[VEGA_MIME]), "text/plain": data["text/plain"]}
    output.data = {mime: data[mime] for mime in KEPT if mime in data}
    output.metadata = {}
    return output


def picture(spec: dict[str, Any]) -> str:
    """A chart as a PNG on white, in base64; a palette of 256 colours takes a third of the bytes."""
    drawn = {**spec, "config": vega_config(palette.TEXT_COLOUR), "background": "white"}
    png = vl_convert.vegalite_to_png(drawn, vl_version=VEGA_LITE, scale=SCALE)
    small = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def source_digest(notebook: Any) -> str:
    """What says whether the code has been changed since its outputs were kept."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or STRATEGY_NOTEBOOKS:
        print(f"executing {chosen}", flush=True)
        save(chosen)
