"""What the notebook on hybrid parallelism and topology shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Each dimension saves memory, and tensor parallelism belongs inside a node."""
    peaks = shown.peaks("results = {")
    assert_sources_agree(peaks, estimated=0.02, rehearsed=0.02)
    assert min(peaks, key=lambda name: peaks[name]["measured"]) == "all three"
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
    times = {
        name: own["estimated"]
        for name, own in shown.values("Memory without this dimension").items()
    }
    assert set(times) == {"tensor", "pipeline", "data", "sharding", "recomputation"}
    assert max(times, key=lambda name: times[name]) == "pipeline" and min(times.values()) > 1.5
    check_memory_over_time(shown)
    check_placements(shown)
    splits = totals(shown, "splits = {")
    assert min(splits, key=lambda name: splits[name]) == "tensor 8 x pipeline 8"


def check_memory_over_time(shown: Shown) -> None:
    """Each of four layers has two peaks in the backward, of weight gradients of its MLP."""
    levels = {row["event"]: row for row in shown.chart("over_time = wb.rehearse")}
    forward, backward = (
        [row["total"] for row in levels.values() if row["action"] == f"0{kind}1"] for kind in "FB"
    )
    tops = [b for a, b, c in zip([min(backward), *backward], backward, backward[1:]) if a < b > c]
    high = [size for size in tops if size > (max(tops) + min(tops)) / 2]
    assert len(high) == 8 and min(high) > max(forward)
    (mlp,) = (row for row in shown.of("peak_allocations") if "text/html" in row.data)
    assert "blocks.3.mlp<" in mlp.data["text/html"]


def check_placements(shown: Shown) -> None:
    """Racks that are joined at a quarter of the rate cost the worst placement the most."""
    placed = totals(shown, "ends = {")
    best = {name: seconds for name, seconds in placed.items() if "best" in name}
    assert len(placed) == 4 and all("best: tensor" in name for name in best)
    worst = [own["estimated"] for own in shown.values("Worst placement").values()]
    assert worst == sorted(worst) and worst[0] > 1.3 and worst[1] > 3


def totals(shown: Shown, words: str) -> dict[str, float]:
    """Step time of each bar of the cell's chart."""
    return {row["bar"]: row["total"] for row in shown.chart(words)}
