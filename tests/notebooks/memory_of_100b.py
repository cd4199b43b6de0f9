"""What the notebook on the memory of 100 billion parameters shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Adam takes 16, 16 and 18 bytes a parameter by every instrument; 75 GPUs, or 100."""
    peaks = shown.peaks("results = {")
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.02)
    found = shown.values('"Model states"')
    assert [own["measured"] for own in found.values()] == pytest.approx([16, 16, 18], rel=0.01)
    assert_sources_agree(found, estimated=0.01, rehearsed=0.01)
    gpus = {name: own["estimated"] for name, own in shown.values("gpus = {}").items()}
    assert gpus == {"Adam in fp32, without gradients": 75, "mixed precision": 100}
    cluster = [own["estimated"] for own in shown.peaks("cluster = {").values()]
    assert len(cluster) == 4 and cluster == sorted(cluster, reverse=True)
