"""A seeded subset of all strategies, in which every pair of values meets, equals one device."""

import pytest

from tests.parallel.sweep import covering, proved


@pytest.mark.timeout(900)
def test_every_pair_of_values_equals_one_device() -> None:
    choices = covering(seed=0)
    assert len(choices) > 50, "the space has shrunk"
    failed = [found for found in map(proved, choices) if not found["passed"]]
    assert not failed, "\n".join(map(str, failed))
