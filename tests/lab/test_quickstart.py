"""The quickstart notebook, headless: a real plan, rehearsal, run and comparison."""

import os
from pathlib import Path

import pytest

from .notebooks import executed


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_quickstart_runs_headless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("00_quickstart.ipynb", tmp_path, monkeypatch, timeout=200)
    said = {source.split("\n")[0]: outputs for source, outputs in cells.items()}
    dashboard = said["dashboard = wb.watch(run)"][0].data
    assert (
        "application/vnd.vegalite.v5+json" in dashboard
        and "Finished: 40 steps" in dashboard["text/plain"]
    )
    assert (
        "application/vnd.jupyter.widget-view+json"
        in said[next(k for k in said if "Planner(" in k)][0].data
    )
    table = said["comparison = wb.compare(estimate, rehearsal, run.profile())"][0].data
    assert "measured in run" in table["text/plain"] and (tmp_path / "report.html").exists()
    assert os.listdir(tmp_path / "runs")
