"""Execute notebooks and keep what they show as pictures and tables, so that they read on GitHub.

`python -m tests.notebooks.save [NAME ...]`; default all notebooks.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import vl_convert
from PIL import Image

from tests.lab.notebooks import executed_notebook
from tests.notebooks.strategy_notebooks import ALL_NOTEBOOKS, NOTEBOOKS
from workbench.lab import palette
from workbench.lab.live.figure import VEGA_MIME, vega_config
from workbench.lab.pictures.pictures import VEGA_LITE

KEPT = ("image/png", "text/html", "text/plain")
WIDGET = "application/vnd.jupyter.widget-view+json"
LIVE_VIEW = re.compile('src="data:image/svg\\+xml;base64,([^"]+)"')
"""The picture that a live view keeps of itself."""
SCALE = 1.5
"""Pixels of a picture for one of the chart."""


def save(name: str) -> None:
    """Execute a notebook in a folder of its own, and write it back with its outputs."""
    path = NOTEBOOKS / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        keep(executed_notebook(path.name, Path(folder), patch, timeout=1200), path, folder)


def keep(notebook: Any, path: Path, folder: str) -> None:
    """Write a notebook that was executed in `folder` with what GitHub shows of its outputs."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {}
        if cell.cell_type == "code":
            said = (output for output in cell.outputs if output.get("name") != "stderr")
            shown = [kept(output, folder) for output in said]
            cell.outputs = [output for output in shown if output.get("data", output)]
    notebook.metadata.pop("widgets", None)  # the state of live views
    notebook.metadata["source_sha256"] = source_digest(notebook)
    nbformat.write(notebook, path)


def kept(output: Any, folder: str) -> Any:
    """An output with what GitHub shows alone: a chart or a live view as a picture, text, a table;
    without the path of `folder`.
    """
    if output.output_type == "stream":
        output.text = output.text.replace(f"{folder}/", "")
        return output
    data = {mime: own.replace(f"{folder}/", "") for mime, own in texts(output.data)}
    if VEGA_MIME in output.data:
        data = {"image/png": picture(output.data[VEGA_MIME]), "text/plain": data["text/plain"]}
    if found := LIVE_VIEW.search(data.get("text/html", "")):
        svg = base64.b64decode(found[1]).decode()
        data = {"image/png": small_png(vl_convert.svg_to_png(svg, scale=SCALE))}
    if WIDGET in output.data:
        data = {}  # its picture stands below it
    output.data = {mime: data[mime] for mime in KEPT if mime in data}
    output.metadata = {}
    return output


def texts(data: Any) -> Iterable[tuple[str, str]]:
    """Texts of an output, by mime."""
    return ((mime, own) for mime, own in data.items() if isinstance(own, str))


def picture(spec: dict[str, Any]) -> str:
    """A chart as a PNG on white, in base64."""
    drawn = {**spec, "config": vega_config(palette.TEXT_COLOUR), "background": "white"}
    return small_png(vl_convert.vegalite_to_png(drawn, vl_version=VEGA_LITE, scale=SCALE))


def small_png(png: bytes) -> str:
    """A PNG in base64, on white and with a palette of 256 colours, which takes a third of the
    bytes.
    """
    small = io.BytesIO()
    drawn = Image.open(io.BytesIO(png)).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def source_digest(notebook: Any) -> str:
    """What says whether the code has been changed since its outputs were kept."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ALL_NOTEBOOKS:
        print(f"executing {chosen}", flush=True)
        save(chosen)
