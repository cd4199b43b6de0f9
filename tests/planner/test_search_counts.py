"""How much a search does, in counts that are the same on every machine."""

import pytest

from tests.benchmarks.planner import MOST, MOST_MODULES, counts


@pytest.mark.parametrize("space", list(MOST))
def test_a_search_does_no_more_than_it_did(space: str) -> None:
    found = counts(space)
    assert {name: most for name, most in MOST[space].items() if found[name] > most} == {}
    assert found["modules"] <= MOST_MODULES
    assert 0 < found["feasible"] < found["candidates"]
