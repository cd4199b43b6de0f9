"""What the notebook on tensor parallelism shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """1-D sends least on four ranks and holds most; on 64 it sends most."""
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.03, rehearsed=0.01)
    sent = shown.values("Sent by a rank in one step")
    assert_sources_agree(sent, estimated=1e-3, rehearsed=1e-3)
    assert max(peaks, key=lambda name: peaks[name]["measured"]) == "1-D"
    assert min(sent, key=lambda name: sent[name]["measured"]) == "1-D"
    calls = shown.table("def calls(")
    assert calls["broadcast"][:2] == [0, 0] < calls["broadcast"][1:]
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
    eight = [own["rehearsed"] for own in shown.peaks("memory_by_plan(eight").values()]
    assert len(eight) == 3 and eight == sorted(eight, reverse=True)
    for gpus, numbers in shown.values("Weak scaling of 1-D").items():
        assert numbers["estimated"] == pytest.approx(numbers["published"], rel=0.1), gpus
    lines = {(row["algorithm"], row["GPUs"]): row["GiB"] for row in shown.chart('Figure("sent"')}
    at_64 = {name: size for (name, gpus), size in lines.items() if gpus == 64}
    assert max(at_64, key=lambda name: at_64[name]) == "1-D" and len(at_64) == 4
    assert lines["1-D", 4] < lines["2-D", 4]
