"""Notebooks of the house, run headless."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def executed(
    name: str, folder: Path, patch: pytest.MonkeyPatch, timeout: int
) -> dict[str, list[Any]]:
    """Run a notebook in `folder`; source of each code cell -> its outputs."""
    notebook = executed_notebook(name, folder, patch, timeout)
    return {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def executed_notebook(name: str, folder: Path, patch: pytest.MonkeyPatch, timeout: int) -> Any:
    """The notebook with the outputs of a run in `folder`."""
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
    patch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / name, 4)
    # A kernel may flush within a cell, so that what the cell prints comes in several outputs: they
    # are made one.
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, resources=resources, coalesce_streams=True).execute()
    return notebook
