"""The planner's notebook, headless: a search, its front, reasons, operators, foreign files and
published rows.
"""

from pathlib import Path
from typing import Any

import pytest

from workbench.plan.schema import Plan

from .notebooks import executed


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_planner_notebook_runs_headless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs_by_source = executed("01_planner.ipynb", tmp_path, monkeypatch, timeout=60)

    def of(words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        return next(outputs for source, outputs in outputs_by_source.items() if words in source)

    front = of("charts.pareto_front(")[0].data
    assert "application/vnd.vegalite.v5+json" in front and "estimated" in front["text/plain"]
    assert "no plan meets 'peak_gib<1'" in of(".empty")[0].text
    assert Plan.load(tmp_path / "best.yaml").resolve().strategy.data.offload == "none"
    assert "Neighbours: one knob, one step (estimated)" in of("wb.explain(")[0].data["text/html"]
    assert of("gain = ")[0].text.endswith("tokens/s (estimated)\n")
    assert (
        "attention.qkv by columns and attention.o by its inner dimension"
        in of("wb.operators(job")[0].text
    )
    assert "wall_clock_breakdown" in of("wb.import_config(")[0].data["text/html"]
    assert "--tensor-model-parallel-size" in of("wb.translate(")[1].data["text/html"]
    assert of("wb.validate(")[0].text.startswith("3 of 3 rows predicted")
