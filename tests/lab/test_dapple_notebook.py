"""The notebook on DAPPLE, headless: layers profiled, stages searched, three strategies predicted
and run, memory of two schedules, published plans.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from .notebooks import executed

TIMEOUT = 600


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_the_dapple_notebook_runs_headless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs_by_source = executed("17_dapple.ipynb", tmp_path, monkeypatch, timeout=TIMEOUT)

    def of(words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        (outputs,) = (outputs for source, outputs in outputs_by_source.items() if words in source)
        return outputs

    def figures(words: str, row: str) -> list[float]:
        """The figures of one row of the table that the cell with the words shows."""
        text = of(words)[0].data["text/plain"]
        found = [line for line in text.splitlines() if line.startswith(row)]
        return [float(figure) for line in found for figure in line[len(row) :].split()]

    assert of("wb.profile_layers(")[0].text.startswith("measured ")
    assert "replicas 2:1" in of("wb.search(")[0].data["text/plain"]
    losses = figures("side_by_side", "loss of the last step")
    assert len(losses) == 3 and max(losses) - min(losses) <= 2e-3
    simulated = figures("side_by_side", "step, s (simulated)")
    estimated = figures("side_by_side", "step, s (estimated)")
    assert all(0 < low <= high for low, high in zip(estimated, simulated, strict=True))
    assert simulated[0] < simulated[1]  # [2, 1] replicas beat three balanced stages
    assert min(figures("side_by_side", "CPU s (measured)")) > 0
    assert re.search(r"'passed': True", of("wb.verify(")[0].data["text/plain"])
    for words in ("Forward and backward by layer", "charts.timeline(", "GPipe keeps every"):
        assert "application/vnd.vegalite.v5+json" in of(words)[0].data
    four, sixteen = (figures("memory.pivot_table(", f"{count} ") for count in (4, 16))
    early, gpipe = (later / now for now, later in zip(four, sixteen) if now == now)
    assert early < 1.05 and gpipe > 1.5
    speed_ups = of("compare_published(name")
    assert "3.23" in speed_ups[0].text
    assert "BERT-Large" in speed_ups[1].data["text/plain"]
    assert "number 1 of the search's" in of("found.explained")[0].text
