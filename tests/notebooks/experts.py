"""What the notebook on experts shows."""

import pytest

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """A capacity fixes memory, at the price of the loss; without one a rank is busier."""
    peaks = shown.peaks("memory_by_plan(results")
    limited = {name: peaks[name] for name in ("capacity 1", "capacity 2")}
    assert_sources_agree(limited, estimated=0.02, rehearsed=0.01)
    assert peaks["capacity 2"]["measured"] > 1.4 * peaks["capacity 1"]["measured"]
    assert peaks["dropless"]["measured"] > 1.1 * peaks["capacity 1"]["measured"]
    shares = shown.table("def rows_by_rank(")
    assert [shares[rank][1:] for rank in "0123"] == [[25.0, 25.0]] * 4
    dropless = [shares[rank][0] for rank in "0123"]
    assert sum(dropless) == pytest.approx(100, abs=0.3) and max(dropless) > 26
    dropless_loss, least, twice = shown.table("profiles.measured.loss")["3"]
    assert dropless_loss < twice < least
    spread = [own["rehearsed"] for own in shown.peaks("spread = {").values()]
    assert len(spread) == 3 and spread == sorted(spread, reverse=True)
    for name, numbers in shown.values("Active parameters of a token").items():
        assert numbers["estimated"] == pytest.approx(numbers["published"], rel=0.02), name
    cluster = [own["estimated"] for own in shown.peaks("cluster = {").values()]
    assert len(cluster) == 4 and cluster == sorted(cluster, reverse=True)
