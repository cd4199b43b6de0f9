"""What the notebook on long sequences shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """All strategies hold about as much; an all-to-all over heads sends least."""
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.03, rehearsed=0.02)
    assert "measured" not in peaks["USP"]
    sent = shown.values("Sent by a rank in one step")
    assert_sources_agree(sent, estimated=1e-3, rehearsed=1e-3)
    order = ["Ulysses", "USP", "ring", "sequence parallel"]
    assert sorted(sent, key=lambda name: sent[name]["rehearsed"]) == order
    per_layer = 8 * (3 / 4) * 1024 * 256 * 4 / 4 / 2**20  # MiB of Ulysses: N h / P eight times
    assert sent["Ulysses"]["measured"] == pytest.approx(4 * per_layer)
    for losses in shown.table("profile.loss for name").values():
        assert len(losses) == 3 and max(losses) - min(losses) <= 1e-3
    rows = shown.chart("Sent by a GPU in one step")
    by_length = {(row["strategy"], row["tokens"]): row["value"] for row in rows}
    assert by_length["sequence parallel", 8] < by_length["ring", 8]
    assert by_length["sequence parallel", 512] > by_length["ring", 512] > by_length["Ulysses", 512]
