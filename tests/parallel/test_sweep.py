"""Seeded subsets of all strategies, in which every value or every pair is met, equal one device."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.sweep import (
    compile_once,
    covering_choices,
    drawn_pool,
    fewest_choices,
    joined_values,
    verify_choice,
)
from tests.parallel.sweep_record import Details, summary, verify_all, write_summary

CHOICE = {"algorithm": "1d", "schedule": "1f1b", "zero": 0, "kernels": "eager", "mesh": (1, 2)}
RECORD = Path(__file__).parents[2] / "data/benchmarks/verified.json"


def choice(**changes: Any) -> dict[str, Any]:
    return {**CHOICE, "precision": "fp64", **changes}


def result(passed: bool = True, relative: float = 1e-12, **changes: Any) -> dict[str, Any]:
    return {**choice(**changes), "passed": passed, "worst": "head.weight", "relative": relative}


def assert_equal_to_one_device(choices: list[dict[str, Any]]) -> None:
    compile_once()
    failed = [found for found in map(verify_choice, choices) if not found["passed"]]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_value_and_some_pairs_equal_one_device() -> None:
    choices = fewest_choices(drawn_pool(seed=0), together=1)
    met = {value for choice in choices for value in joined_values(choice, together=1)}
    assert {(("pipeline axis", 4),), (("kernels", "fused"),), (("algorithm", "3d"),)} <= met
    assert_equal_to_one_device(choices + random.Random(0).sample(covering_choices(seed=0), 12))


@pytest.mark.slow  # "not slow" leaves it out too
@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_every_pair_of_values_equals_one_device() -> None:
    choices = covering_choices(seed=0)
    assert len(choices) > 50, "the space has shrunk"
    assert_equal_to_one_device(choices)


def test_details_are_written_as_they_come_a_plan_a_line(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "verified.jsonl"
    details = Details(path, {"torch": "2"})
    for number, passed in enumerate((True, False), 1):
        details.add({"mesh": (1, 2), "passed": passed})
        assert len(path.read_text().splitlines()) == number + 1
    head, *rows = map(json.loads, path.read_text().splitlines())
    assert head == {"torch": "2"}
    assert rows == [{"mesh": [1, 2], "passed": True}, {"mesh": [1, 2], "passed": False}]
    assert [other.name for other in path.parent.iterdir()] == ["verified.jsonl"]


def test_a_stopped_sweep_resumes_from_its_details(tmp_path: Path) -> None:
    path, verified = tmp_path / "verified.jsonl", []

    def verify_one(one: dict[str, Any]) -> dict[str, Any]:
        verified.append(one["zero"])
        return {**one, "passed": True, "worst": "head.weight", "relative": 0.0}

    choices = [choice(zero=zero) for zero in range(4)]
    verify_all(choices[:2], verify_one, Details(path, {"torch": "2"}))
    with path.open("a") as file:
        file.write('{"torn": ')
    found = verify_all(choices, verify_one, Details(path, {"torch": "2"}))
    assert verified == [0, 1, 2, 3]
    assert [row["zero"] for row in found] == [0, 1, 2, 3]
    assert len(Details(path, {"torch": "2"}).rows) == 4


def test_details_of_other_versions_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "verified.jsonl"
    Details(path, {"torch": "1"}).add(result())
    assert Details(path, {"torch": "2"}).rows == []
    former = path.with_name("verified.jsonl.old").read_text().splitlines()
    assert json.loads(former[0]) == {"torch": "1"} and len(former) == 2


def test_a_summary_counts_plans_and_keeps_the_worst_error_at_each_precision(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "verified.json"
    found = [
        result(),
        result(relative=3e-12, kernels="fused"),
        result(relative=2e-6, precision="fp32"),
        {**choice(zero=3), "passed": False, "error": "rank 1 failed"},
    ]
    write_summary(path, summary({"torch": "2"}, found))
    read = json.loads(path.read_text())
    counts = {"plans": 4, "failed": 1, "worst": {"fp32": 2e-6, "fp64": None}}
    assert {key: read[key] for key in ("torch", *counts)} == {"torch": "2", **counts}
    first = {"plans": 3, "failed": 0, "worst": {"fp32": 2e-6, "fp64": 3e-12}}
    assert read["groups"] == [
        {"algorithm": "1d", "schedule": "1f1b", "zero": 0, **first},
        {"algorithm": "1d", "schedule": "1f1b", "zero": 3, "plans": 1, "failed": 1}
        | {"worst": {"fp64": None}},
    ]
    assert read["values"]["kernels"]["fused"]["worst"] == {"fp64": 3e-12}
    assert read["values"]["mesh"] == {"[1, 2]": counts}
    assert [other.name for other in path.parent.iterdir()] == ["verified.json"]


def test_the_recorded_sweep_has_no_failure_and_is_within_tolerance() -> None:
    read = json.loads(RECORD.read_text())
    assert read["failed"] == 0 and read["plans"] == sum(one["plans"] for one in read["groups"])
    assert read["worst"]["fp64"] <= 1e-10 and read["worst"]["fp32"] <= 1e-5
