"""What the notebook on real weights shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Every mesh predicts alike, instruments agree, the file written back predicts as well."""
    types = shown.table("open_gguf(model)")
    assert types["Q4_1"][-1] == 5 and types["Q8_0"][-1] == 8.5
    assert "['Sm',\n 'ol',\n 'LM',\n '2'" in shown.of("SmolLM2 on 3")[-1].data["text/plain"]
    found = [value for (value,) in shown.table("meshes = {").values()]
    assert len(found) == 3 and max(found) - min(found) <= 2e-4 * min(found) < 2e-4 * 20
    beside = shown.values("Perplexity of the text")
    assert [round(one["measured"], 4) for one in beside.values()] == found
    assert "Gravity is a fundamental" in shown.of("What is gravity?")[0]["text"]
    peaks = shown.peaks("memory_by_plan({name")
    assert_sources_agree(peaks, estimated=0.03, rehearsed=0.02)
    totals = {row["total"] for row in shown.chart("charts.memory(run.profile())")}
    assert max(totals) - min(totals) <= 1e-3 * max(totals)
    (size, before), (written, after) = shown.table("sizes = [").values()
    assert size < written < 150 and 0.8 * before < after < before
