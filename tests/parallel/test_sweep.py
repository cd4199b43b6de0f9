"""A seeded subset of all strategies, in which every pair of values meets, equals one device."""

import json
from pathlib import Path

import pytest

from tests.parallel.sweep import compile_once, covering, keep, proved


@pytest.mark.timeout(900)
def test_every_pair_of_values_equals_one_device() -> None:
    choices = covering(seed=0)
    assert len(choices) > 50, "the space has shrunk"
    compile_once()
    failed = [found for found in map(proved, choices) if not found["passed"]]
    assert not failed, "\n".join(map(str, failed))


def test_what_is_proved_is_kept_as_it_comes_a_plan_a_line(tmp_path: Path) -> None:
    path, found = tmp_path / "not" / "there" / "verified.json", []
    for passed in (True, False):
        found.append({"mesh": (1, 2), "passed": passed})
        keep(path, {"torch": "2"}, found, 0.6)
    read = json.loads(path.read_text())
    assert read.pop("proved") == [
        {"mesh": [1, 2], "passed": True},
        {"mesh": [1, 2], "passed": False},
    ]
    assert read == {"torch": "2", "seconds": 1, "plans": 2, "failed": 1}
    assert [line.count("passed") for line in path.read_text().splitlines() if "passed" in line] == [
        1,
        1,
    ]
    assert [other.name for other in path.parent.iterdir()] == ["verified.json"]
