"""The notebook on graph-kernel fusion, headless: operators and bytes counted, correctness, time,
the gain on a GPU.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from .notebooks import executed


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_fusion_notebook_runs_headless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs_by_source = executed("02_graph_kernel_fusion.ipynb", tmp_path, monkeypatch, timeout=200)

    def of(words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        (outputs,) = (outputs for source, outputs in outputs_by_source.items() if words in source)
        return outputs

    forward = of('written_out[written_out["pass"]')[0].data["text/plain"]
    assert len(re.findall(r"forward +aten\.", forward)) == 11
    loops = next(o for o in of("torch.compile(layer_norm") if o.output_type == "execute_result")
    assert loops.data["text/plain"].count("_fused_") == 2
    ours = of("by_hand = operators(ours)")[0].data["text/plain"]
    # x read and y written; x and a gradient read and another written; and what is small beside 4
    # MiB.
    moved = [
        sum(map(int, re.findall(r"\d{6,}", line))) / 2**22
        for line in ours.splitlines()
        if "workbench." in line
    ]
    assert [round(tensors) for tensors in moved] == [2, 3]
    for cell in ("Memory traffic of one", "milliseconds, forward and backward"):
        assert "application/vnd.vegalite.v5+json" in of(cell)[0].data
    assert re.search(r"[\d.]+ times as fast \(measured\)", of("speed_up = ")[0].text)
    on_gpu = of("on_gpu = ")[0].data["text/plain"]
    assert "(estimated)" in on_gpu and "eleven operators" in on_gpu
    assert of('for kernels in ("eager"')[0].text.count("s step time (estimated)") == 3
