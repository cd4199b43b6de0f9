"""The notebook on a user's own module, headless: estimated, rehearsed, split, verified and run on
two ranks, cut into stages; and one that cannot be traced.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from .notebooks import executed

TIMEOUT = 600


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_the_notebook_on_a_users_module_runs_headless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs_by_source = executed("21_your_own_module.ipynb", tmp_path, monkeypatch, timeout=TIMEOUT)

    def of(words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        (outputs,) = (outputs for source, outputs in outputs_by_source.items() if words in source)
        return outputs

    def shown(words: str) -> str:
        return str(of(words)[-1].data["text/plain"])

    assert "torch" in (tmp_path / "their_model.py").read_text()
    assert "workbench" not in (tmp_path / "their_model.py").read_text()
    found = shown("found = wb.operators(")
    assert "layers.3.linear1" in found and "columns 2 ways" in found
    assert "layers.0.linear1" not in found
    assert "by columns and layers.*.linear2 by its inner" in of("print(found.reason)")[0].text
    for words in ("wb.verify(split", "wb.verify(pipeline", "wb.verify(routed"):
        assert "'passed': True" in shown(words)
    assert "estimated · rehearsed · measured" in shown("charts.memory(*profiles)")
    first, second = map(float, re.findall(r"(\d+) and (\d+) MFLOP", shown("Two stages"))[0])
    assert max(first, second) < 0.6 * (first + second)
    stages = of("Two stages")[-1].data["application/vnd.vegalite.v5+json"]
    rows = stages["data"]["values"]
    by_stage = [[row["block"] for row in rows if row["stage"] == f"stage {n}"] for n in (0, 1)]
    assert by_stage == [["layers.0", "layers.1", "layers.2"], ["layers.2", "layers.3", "head"]]
    (refused,) = of("except ValueError as refused")
    assert "cannot be traced" in refused.text and ".nonzero():" in refused.text
    assert refused.text.startswith("model.python: ") and "their_router.py:" in refused.text
    for words in ("wb.rehearse(plan", "charts.collectives(", "Two stages"):
        assert "application/vnd.vegalite.v5+json" in of(words)[-1].data
