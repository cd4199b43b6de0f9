"""What the notebook on operator strategies shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def text(shown: Shown, words: str) -> str:
    """What the cell prints, and its table as text."""
    outputs = shown.of(words)
    return "\n".join(o["text"] if "text" in o else o.data["text/plain"] for o in outputs)


def check(shown: Shown) -> None:
    """Check that what is done by hand is what is planned, and that instruments agree."""
    assert "bytes by hand equal the planner's" in text(shown, "planned == by_hand(text)")
    peaks = shown.peaks("memory_by_plan(results")
    assert_sources_agree(peaks, estimated=1e-3, rehearsed=1e-3)
    assert peaks["found in 22 MiB"]["measured"] <= 22
    assert peaks["the pair"]["measured"] < 22 < peaks["found"]["measured"]
    assert_sources_agree(shown.values("Sent by a rank in one step"), estimated=1e-3, rehearsed=1e-3)
    assert "calls agree: True" in text(shown, "together.nunique(")
    for losses in shown.table("profiles.measured.loss").values():
        assert max(losses) - min(losses) <= 1e-3
