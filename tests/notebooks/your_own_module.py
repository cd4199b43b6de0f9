"""What the notebook on a module of one's own shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Wide layers are split, the cut balances, instruments agree, what has no trace is named."""
    found = shown.of("found = wb.operators(")[-1].data["text/plain"]
    assert "layers.3.linear1" in found and "columns 2 ways" in found
    assert "layers.0.linear1" not in found
    reason = shown.of("print(found.reason)")[0]["text"]
    assert "by columns and layers.*.linear2 by its inner" in reason
    rows = shown.chart("Two stages of the traced model")
    by_stage = [
        [row["block"] for row in rows if row["stage"] == f"stage {number}"] for number in (0, 1)
    ]
    assert by_stage == [["layers.0", "layers.1", "layers.2"], ["layers.2", "layers.3", "head"]]
    sums = [sum(r["MFLOP"] for r in rows if r["stage"] == f"stage {n}") for n in (0, 1)]
    assert max(sums) < 0.6 * sum(sums)
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.03, rehearsed=0.01)
    assert max(peaks, key=lambda name: peaks[name]["measured"]) == "data parallel"
    assert_sources_agree(shown.values("Sent by a rank in one step"), estimated=1e-3, rehearsed=1e-3)
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
    cluster = shown.peaks("memory_by_plan({name: [profile]")
    assert cluster["ZeRO-3"]["estimated"] < cluster["pipeline, 4 stages"]["estimated"]
    (refused,) = shown.of("except ValueError as refused")
    assert "cannot be traced" in refused["text"] and ".nonzero():" in refused["text"]
    assert refused["text"].startswith("model.python: ") and "their_router.py:" in refused["text"]
