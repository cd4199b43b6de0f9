"""What the notebook on DAPPLE shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Two stages of two ranks and one beat three balanced ones; published plans are found."""
    assert shown.of("wb.profile_layers(")[0]["text"].startswith("measured ")
    assert "replicas 2:1" in shown.of("found = wb.search(")[-1].data["text/plain"]
    speed_up = shown.values("Speed-up over one rank")
    assert speed_up["two and one"]["estimated"] > speed_up["three stages"]["estimated"] > 1
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=0.03, rehearsed=0.01)
    assert max(peaks, key=lambda name: peaks[name]["measured"]) == "data parallel"
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 2e-3
    assert "3.23" in shown.of("comparisons = {")[0]["text"]
    published = shown.values("Speed-up on 16 V100")
    for model in {name.partition(":")[0] for name in published}:
        best = published[f"{model}: search"]["estimated"]
        assert best >= published[f"{model}: DAPPLE, published"]["estimated"] - 1e-9
    assert "number 1 of the search's" in shown.of("found.explained")[0]["text"]
