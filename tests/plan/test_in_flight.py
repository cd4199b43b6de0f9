"""`strategy.pipeline.in_flight`: microbatches that a stage keeps, at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.parallel.small import plan
from workbench.errors import PlanError
from workbench.plan.schedule_table import executed, schedule_table, stages_in_flight
from workbench.schedules import generate, in_flight, write_csv


def bounded(most: Any, schedule: str = "1f1b", stages: int = 4, **changes: Any) -> Any:
    pipeline = {"strategy.pipeline.in_flight": most, "strategy.pipeline.schedule": schedule}
    return plan(1, stages, 1, microbatches=8, changes=pipeline | changes)


@pytest.mark.parametrize(
    ("most", "schedule", "held"),
    [
        (None, "eager-1f1b", (7, 5, 3, 1)),
        (2, "1f1b", (2, 2, 2, 1)),
        (2, "eager-1f1b", (2, 2, 2, 1)),
        ([4, 1, 1, 1], "1f1b", (4, 1, 1, 1)),
        ([6, 6, 6, 2], "eager-1f1b", (6, 5, 3, 1)),
    ],
)
def test_a_plans_table_keeps_as_many_as_it_says(
    most: Any, schedule: str, held: tuple[int, ...]
) -> None:
    resolved = bounded(most, schedule).resolve()
    assert stages_in_flight(resolved) == held
    assert in_flight(schedule_table(resolved)) == in_flight(executed(resolved)[0]) == held


@pytest.mark.parametrize("most", [3, [1]])
def test_one_stage_keeps_one_and_takes_no_bound(most: Any) -> None:
    assert in_flight(schedule_table(bounded(None, stages=1).resolve())) == (1,)
    with pytest.raises(PlanError, match=r"in_flight: is .* pipeline\.size is 1, .* legal: null"):
        bounded(most, stages=1).resolve()


@pytest.mark.parametrize(
    ("most", "schedule", "said"),
    [
        ([2, 1], "1f1b", r"\[2, 1\] gives 2 stages; legal: 4 numbers, or one"),
        ([], "eager-1f1b", r"\[\] gives 0 stages; legal: 4 numbers"),
        (
            [4, 1, 9, 1],
            "1f1b",
            r"\[4, 1, 9, 1\] lets stage 2 keep 9, but stage 1 keeps 1; legal: not above that of",
        ),
        (2, "gpipe", "is 2, but schedule gpipe .* legal: null, or schedule 1f1b or eager-1f1b"),
        ([1] * 4, "zb-h1", r"is \[1, 1, 1, 1\], but schedule zb-h1 keeps what its order asks for"),
    ],
)
def test_what_no_schedule_can_keep_is_refused(most: Any, schedule: str, said: str) -> None:
    with pytest.raises(PlanError, match=rf"strategy\.pipeline\.in_flight: {said}"):
        bounded(most, schedule).resolve()


def test_a_table_of_ones_own_has_its_number(tmp_path: Path) -> None:
    write_csv(generate("1f1b", 4, 8), tmp_path / "mine.csv")
    with pytest.raises(PlanError, match=r"in_flight: is 2, but schedule .*mine\.csv keeps"):
        bounded(2, str(tmp_path / "mine.csv")).resolve()


def test_another_frameworks_number_is_its_own() -> None:
    with pytest.raises(PlanError, match=r"in_flight: is 2, but how many megatron keeps"):
        bounded(2, **{"strategy.stack": "megatron"}).resolve()


def test_replicas_in_turn_keep_their_number_together() -> None:
    """Of replicas 2 and 1 the second stage may keep two on its only one, and no three."""
    turns = {
        "cluster.gpus": 3,
        "strategy.pipeline.replicas": [2, 1],
        "strategy.pipeline.distribution": "round_robin",
    }
    assert stages_in_flight(bounded([1, 2], stages=2, **turns).resolve()) == (2, 1)
    said = "stage 1 keep 3 on all its replicas, but stage 0 keeps 2; legal: not above"
    with pytest.raises(PlanError, match=said):
        bounded([1, 3], stages=2, **turns).resolve()


def test_the_bound_of_a_bound_names_what_it_bounds() -> None:
    with pytest.raises((PlanError, ValidationError), match=r"at most 10000 .*run has stages"):
        bounded(10**6)


@pytest.mark.parametrize("most", [0, -1, [1, 0, 1, 1], 1.5])
def test_a_stage_keeps_one_at_least(most: Any) -> None:
    with pytest.raises((PlanError, ValidationError), match="in_flight"):
        bounded(most)
