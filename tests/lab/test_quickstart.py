"""The quickstart notebook, headless: a real plan, rehearsal, run and comparison."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_quickstart_runs_headless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / "00_quickstart.ipynb", 4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {cell.source.split("\n")[0]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    dashboard = said["dashboard = wb.watch(run)"][0].data
    assert "application/vnd.vegalite.v5+json" in dashboard and "Finished: 40 steps" in dashboard["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in said[next(k for k in said if "Planner(" in k)][0].data
    table = said["comparison = wb.compare(estimate, rehearsal, run.profile())"][0].data
    assert "measured in run" in table["text/plain"] and (tmp_path / "report.html").exists()
    assert os.listdir(tmp_path / "runs")
