"""What the notebook on hybrid parallelism and topology shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Each dimension saves memory, and tensor parallelism belongs inside a node."""
    peaks = shown.peaks("results = {")
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.02)
    assert min(peaks, key=lambda name: peaks[name]["measured"]) == "tensor x pipeline"
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
    times = {
        name: own["estimated"]
        for name, own in shown.values("Memory without this dimension").items()
    }
    assert len(times) == 4 and min(times.values()) > 1.5
    assert max(times, key=lambda name: times[name]) == "pipeline"
    placed = totals(shown, "placed = {")
    fastest = min(placed, key=lambda name: placed[name])
    assert len(placed) == 6 and fastest.startswith("tensor")
    assert max(placed.values()) > 1.3 * placed[fastest]
    splits = totals(shown, "splits = {")
    assert min(splits, key=lambda name: splits[name]) == "tensor 8 x pipeline 8"


def totals(shown: Shown, words: str) -> dict[str, float]:
    """Step time of each bar of the cell's chart."""
    return {row["bar"]: row["total"] for row in shown.chart(words)}
