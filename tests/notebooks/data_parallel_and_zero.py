"""What the notebook on data parallelism and ZeRO shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree

STAGES = ["zero-0", "zero-1", "zero-2", "zero-3"]


def check(shown: Shown) -> None:
    """Memory falls with the stage, communication rises with the last, states are the paper's."""
    peaks = shown.peaks("memory_by_plan(results")
    assert list(peaks) == STAGES and all(len(sources) == 4 for sources in peaks.values())
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.02)
    measured = [peaks[stage]["measured"] for stage in STAGES]
    assert measured == sorted(measured, reverse=True)
    sent = shown.values("Sent by a rank")
    assert_sources_agree(sent, estimated=1e-3, rehearsed=1e-3)
    once = sent["zero-0"]["measured"]
    assert [sent[stage]["measured"] / once for stage in STAGES[1:3]] == pytest.approx([1, 1])
    assert 1.4 < sent["zero-3"]["measured"] / once <= 1.5
    for losses in shown.table("measured.loss for stage").values():
        assert len(losses) == 4 and max(losses) - min(losses) <= 0.01
    for stage, numbers in shown.values("Model states of 7.5B").items():
        assert numbers["estimated"] == pytest.approx(numbers["published"], rel=0.02), stage
    limit = shown.peaks("memory_by_plan({stage: [profile]")
    fits = [row for row in shown.chart("memory_by_plan({stage: [profile]") if row.get("capacity")]
    assert limit["zero-0"]["estimated"] > fits[0]["capacity"] > limit["zero-1"]["estimated"]
