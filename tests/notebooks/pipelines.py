"""What the notebook on pipelines shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree

RUN = ["gpipe", "1f1b", "zb-h1", "zb-v"]


def check(shown: Shown) -> None:
    """Bubbles are those of the closed forms, memory is GPipe's or less, and results are equal."""
    idle = shown.values("Idle share of a step")
    assert [name for name in idle if "measured" in idle[name]] == RUN
    for name in RUN:
        assert idle[name]["measured"] == pytest.approx(idle[name]["estimated"]), name
    shares = [idle[name]["estimated"] for name in ("1f1b", "interleaved", "zb-h1", "zb-v")]
    assert shares == sorted(shares, reverse=True) and idle["gpipe"]["estimated"] == shares[0]
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.01)
    measured = {name: peaks[name]["measured"] for name in RUN}
    assert max(measured, key=lambda name: measured[name]) == "gpipe"
    assert measured["gpipe"] > 1.4 * measured["zb-v"]
    held = list(zip(*shown.table("held = {").values()))
    assert held[:3] == [(8, 8, 8, 8), (4, 3, 2, 1), (4, 4, 4, 4)]  # GPipe, 1F1B, ZB-H1
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
    for shares in shown.table("shares = {").values():
        assert len(shares) == 5 and shares[0] == shares[1] > shares[2] > shares[3] >= shares[4]
