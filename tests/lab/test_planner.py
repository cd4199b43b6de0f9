from pathlib import Path

import pytest

from workbench.lab.planner import Planner
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile


@pytest.fixture
def planner() -> Planner:
    return Planner(Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=16, strategy="megatron-3d"))


def test_it_opens_on_a_plan_and_its_estimate(planner: Planner) -> None:
    assert planner.controls.inputs["gpus"].value == 16 and planner.controls.inputs["model"].value == "llama-3-8b"
    assert planner.board.banner["headline"].startswith("Fits: ") and planner.board.banner["tone"] == "good"
    assert [figure["name"] for figure in planner.board.figures] == ["memory", "parts", "collectives", "timeline"]
    assert all(planner.board.rows(name) for name in ("memory", "parts", "collectives", "timeline"))


def test_turning_a_control_changes_the_plan_and_the_charts(planner: Planner) -> None:
    before, bars = planner.plan, planner.board.rows("memory")
    planner.set("tensor", 2)
    assert planner.plan.strategy.tensor.size == 2 and before.complete().strategy.tensor.size != 2
    assert planner.board.rows("memory") != bars
    assert planner.plan == Plan.model_validate(planner.plan.model_dump(exclude_unset=True))


def test_the_answer_is_a_plan_file(planner: Planner, tmp_path: Path) -> None:
    planner.set("micro_batch", 2)
    planner.path.value = str(tmp_path / "plan.yaml")
    planner.board._heard(planner.board, {"type": "press", "action": "write"}, [])
    assert Plan.load(tmp_path / "plan.yaml") == planner.plan
    assert any("Written" in line for line in planner.board.banner["lines"])


def test_a_file_that_cannot_be_written_is_told(planner: Planner, tmp_path: Path) -> None:
    planner.path.value = str(tmp_path / "absent" / "plan.yaml")
    planner.board._heard(planner.board, {"type": "press", "action": "write"}, [])
    assert any("No such file" in line for line in planner.board.banner["lines"])


def test_an_illegal_value_is_told_beside_its_control_and_the_last_legal_plan_stays(planner: Planner) -> None:
    planner.set("pipeline", 1)
    legal = planner.plan
    planner.set("tensor", 64)
    assert planner.plan == legal and planner.problems
    assert "more than heads = 32" in planner.controls.message("tensor")
    assert planner.board.banner["tone"] == "bad" and all(b["disabled"] for b in planner.board.banner["buttons"])
    planner.set("tensor", 4)
    assert planner.problems == [] and planner.controls.message("tensor") == ""
    assert not any(b["disabled"] for b in planner.board.banner["buttons"])


@pytest.mark.parametrize("name", ["gpus", "micro_batch", "global_batch", "sequence_length"])
def test_nothing_that_is_typed_raises(planner: Planner, name: str) -> None:
    for value in (0, -3, 10**9):
        planner.set(name, value)
        assert planner.problems or planner.profile is not None


def test_a_preset_brings_its_own_settings(planner: Planner) -> None:
    planner.set("tensor", 8)
    planner.set("strategy", "zero-3")
    assert planner.controls.inputs["zero"].value == 3 and planner.controls.inputs["tensor"].value == 1
    assert planner.plan.strategy.preset == "zero-3"


def test_what_does_not_fit_says_the_smallest_change(planner: Planner) -> None:
    planner.set("strategy", "ddp")
    planner.set("gpu", "v100-sxm2-32gb")
    banner = planner.board.banner
    assert banner["headline"].startswith("Does not fit") and banner["tone"] == "bad"
    assert "change" in banner["lines"][0]


def test_cost_and_constraint_stand_beneath_the_charts(planner: Planner) -> None:
    before = planner.reasons.value
    assert "card-hours" in before and "kWh" in before and "takes the largest part of a step" in before
    planner.set("strategy", "ddp")
    planner.set("gpu", "v100-sxm2-32gb")
    assert "too much" in planner.reasons.value and planner.reasons.value != before
    assert planner.children.index(planner.reasons) == planner.children.index(planner.board) + 1


def test_one_turn_is_one_estimate(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(plan: Plan) -> Profile:
        calls.append(plan)
        return estimate(plan)

    monkeypatch.setattr("workbench.planner.estimate", counted)
    monkeypatch.setattr("workbench.planner.reasons.figures.estimate", counted)
    planner.set("micro_batch", 2)
    assert len(calls) == 1


def test_many_ranks_get_a_map_and_few_lose_it(planner: Planner) -> None:
    planner.set("gpus", 64)
    assert len(planner.board.rows("memory_map")) == 64
    planner.set("gpus", 8)
    assert "memory_map" not in [figure["name"] for figure in planner.board.figures]


def test_a_rehearsal_is_drawn_beside_the_estimate(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearse(plan: Plan) -> Profile:
        assert planner.profile is not None
        return Profile("p", "rehearsed", 16, planner.profile.memory.assign(source="rehearsed"))

    monkeypatch.setattr("workbench.runs.apart.rehearse", rehearse)
    planner._rehearse_now(planner.plan)
    assert {row["source"] for row in planner.board.rows("memory")} == {"estimated", "rehearsed"}
    planner.set("micro_batch", 2)
    assert {row["source"] for row in planner.board.rows("memory")} == {"estimated"}


def test_a_plan_with_an_inline_shape_can_be_planned(planner: Planner) -> None:
    other = Planner(planner.plan.replace(**{"model.layers": 16}))
    other.set("pipeline", 4)
    assert other.plan.complete().shape.layers == 16
