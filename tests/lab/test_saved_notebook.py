"""What a saved notebook keeps of a planner: seen by nbconvert, where no widget lives."""

import json
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from workbench.cli.commands.lab import OFFLINE_PAGES

CELLS = [
    'import workbench as wb\nplan = wb.Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, '
    'strategy="ddp")',
    "planner = wb.Planner(plan)\nplanner",
    'planner.set("gpus", 4)\nassert planner._saved.drawn.wait(90)',
]


@pytest.mark.slow
def test_a_planner_leaves_its_last_plan_and_charts_in_the_saved_notebook(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, store_widget_state=False).execute()
    path = tmp_path / "plan.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "nbconvert", "--to", "html", *OFFLINE_PAGES, str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page = path.with_suffix(".html").read_text()
    assert "data:image/svg+xml;base64," in page and "gpus: 4" in page
    assert 'src="http' not in page, "nothing is fetched"
    assert "Planner(children" not in json.dumps(notebook)
