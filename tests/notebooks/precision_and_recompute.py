"""What the notebook on precision and recomputation shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Memory falls with each choice, recomputation changes no loss, layers are the paper's."""
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.01)
    measured = [own["measured"] for own in peaks.values()]
    assert len(measured) == 4 and measured == sorted(measured, reverse=True)
    assert measured[1] > 0.6 * measured[0]  # bf16 halves less than it seems
    for fp32, *bf16 in shown.table("profiles.measured.loss").values():
        assert len(set(bf16)) == 1 and fp32 == pytest.approx(bf16[0], abs=0.05)
    extra = shown.values("More operations in a step")
    assert 0 < extra["selective"]["rehearsed"] < 5 < 20 < extra["full"]["rehearsed"] < 34
    kept = shown.values("Activations of a layer")
    assert len(kept) == 5
    for name, numbers in kept.items():
        assert numbers["estimated"] == pytest.approx(numbers["published"], rel=0.01), name
    slower = shown.values("More time for a layer")
    assert slower["sequence"]["estimated"] < 0 < slower["selective"]["estimated"]
    assert slower["selective"]["estimated"] < slower["full"]["estimated"]
    cluster = shown.peaks("cluster = {")
    assert cluster["tensor"]["estimated"] == max(own["estimated"] for own in cluster.values())
