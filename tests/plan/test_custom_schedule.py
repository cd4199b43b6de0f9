"""A plan that names a table of actions is resolved with its content."""

from pathlib import Path

import pytest

from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.schedules import generate
from workbench.schedules.table import write_csv


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "own.csv"
    write_csv(generate("1f1b", 2, 4), path)
    fields = {
        "strategy.pipeline.schedule": str(path),
        "training.global_batch": 4,
        "training.micro_batch": 1,
    }
    return Plan.of("tiny", gpu="local", gpus=2, strategy="dapple", set=fields)


def test_a_resolved_plan_holds_to_the_table_that_it_was_resolved_with(
    plan: Plan, tmp_path: Path
) -> None:
    full = plan.pin()
    assert full.pin() == full and len(full.strategy.pipeline.schedule_sha256 or "") == 64
    write_csv(generate("gpipe", 2, 4), tmp_path / "own.csv")
    with pytest.raises(
        PlanError, match=r"schedule_sha256: is [0-9a-f]{64}, but .*own.csv' now has"
    ):
        full.resolve()
    assert plan.pin().strategy.pipeline.schedule_sha256 != full.strategy.pipeline.schedule_sha256


def test_its_path_does_not_depend_on_the_folder(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    near = plan.replace(**{"strategy.pipeline.schedule": "own.csv"}).pin()
    assert near.strategy.pipeline.schedule == str(tmp_path / "own.csv")


def test_a_hash_without_a_table_is_refused() -> None:
    plan = Plan.of("tiny", gpu="local", gpus=2, strategy="dapple")
    with pytest.raises(PlanError, match=r"schedule_sha256: is abab.* names no file"):
        plan.replace(**{"strategy.pipeline.schedule_sha256": "ab" * 32}).resolve()
