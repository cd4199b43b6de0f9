import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench.errors import PlanError
from workbench.lab.comparison import comparison_tables
from workbench.lab.comparison.compare import compare
from workbench.lab.panel.cancellable import Cancellable
from workbench.lab.panel.control_values import read_path
from workbench.lab.panel.plan_controls import plan_controls
from workbench.lab.panel.plan_edits import apply_edit
from workbench.lab.panel.planner import Planner
from workbench.plan.schema import Plan, written_fields
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.units import interval_text
from workbench.verbs import explain


@pytest.fixture
def planner() -> Planner:
    return Planner(Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=16, strategy="megatron-3d"))


def shown(planner: Planner, name: str) -> dict[str, Any]:
    """What the control `name` shows on the page."""
    return dict(planner.panel.shown["fields"][name])


def send(planner: Planner, **message: Any) -> None:
    """What the page sends when a person does something in the panel."""
    planner.panel._receive(planner.panel, message, [])


def headline(planner: Planner) -> str:
    return str(planner.board.banner["headline"])


def told(planner: Planner) -> str:
    return "\n".join(planner.board.banner["lines"])


def test_it_opens_on_a_plan_and_its_estimate(planner: Planner) -> None:
    assert (
        shown(planner, "gpus")["value"] == 16 and shown(planner, "model")["value"] == "llama-3-8b"
    )
    assert (
        planner.board.banner["headline"].startswith("Fits: ")
        and planner.board.banner["tone"] == "good"
    )
    assert [figure["name"] for figure in planner.board.figures] == [
        "memory",
        "parts",
        "collectives",
        "timeline",
    ]
    assert all(planner.board.rows(name) for name in ("memory", "parts", "collectives", "timeline"))


def test_the_banner_says_the_risk_and_the_interval(planner: Planner) -> None:
    notes = estimate(planner.plan).notes
    chance = notes["memory"]["probability_of_running_out"]
    assert chance < 0.001 and headline(planner).endswith(", out-of-memory risk < 0.1 %")
    assert f"90 % interval {interval_text(notes['step_seconds_90'])}" in told(planner)


def test_turning_a_control_changes_the_plan_and_the_charts(planner: Planner) -> None:
    before, bars = planner.plan, planner.board.rows("memory")
    planner.set("tensor", 2)
    assert planner.plan.strategy.tensor.size == 2 and before.resolve().strategy.tensor.size != 2
    assert planner.board.rows("memory") != bars
    assert planner.plan == Plan.model_validate(planner.plan.model_dump(exclude_unset=True))


def test_the_answer_is_a_plan_file(planner: Planner, tmp_path: Path) -> None:
    planner.set("micro_batch", 2)
    planner.path = str(tmp_path / "plan.yaml")
    planner.board._receive(planner.board, {"type": "press", "action": "write"}, [])
    assert Plan.load(tmp_path / "plan.yaml") == planner.plan
    assert any("Written" in line for line in planner.board.banner["lines"])


def test_a_file_that_cannot_be_written_is_reported(planner: Planner, tmp_path: Path) -> None:
    planner.path = str(tmp_path / "absent" / "plan.yaml")
    planner.board._receive(planner.board, {"type": "press", "action": "write"}, [])
    assert any("No such file" in line for line in planner.board.banner["lines"])


def test_an_illegal_value_is_reported_beside_its_control_and_the_last_legal_plan_stays(
    planner: Planner,
) -> None:
    planner.set("pipeline", 1)
    legal = planner.plan
    planner.set("tensor", 64)
    assert planner.plan == legal and planner.problems
    assert "more than heads = 32" in shown(planner, "tensor")["problem"]
    assert planner.board.banner["tone"] == "bad" and all(
        b["disabled"] for b in planner.board.banner["buttons"]
    )
    planner.set("tensor", 4)
    assert planner.problems == [] and shown(planner, "tensor")["problem"] == ""
    assert not any(b["disabled"] for b in planner.board.banner["buttons"])


@pytest.mark.parametrize("name", ["gpus", "micro_batch", "global_batch", "sequence_length"])
def test_nothing_that_is_typed_raises(planner: Planner, name: str) -> None:
    for value in (0, -3, 10**9):
        planner.set(name, value)
        assert planner.problems or planner.profile is not None


def test_a_preset_brings_its_own_settings(planner: Planner) -> None:
    planner.set("tensor", 8)
    planner.set("strategy", "zero-3")
    assert shown(planner, "zero")["value"] == 3 and shown(planner, "tensor")["value"] == 1
    assert planner.plan.strategy.preset == "zero-3"


def test_a_plan_that_does_not_fit_names_the_smallest_change(planner: Planner) -> None:
    planner.set("strategy", "ddp")
    planner.set("gpu", "v100-sxm2-32gb")
    banner = planner.board.banner
    assert banner["headline"].startswith("Does not fit") and banner["tone"] == "bad"
    assert "change" in banner["lines"][0]


def test_the_smallest_change_is_applied_by_a_button(planner: Planner) -> None:
    planner.set("micro_batch", 16)
    planner.set("sequence_length", 8192)
    assert planner.profile is not None and planner.profile.fits is False
    advice = planner.profile.notes["advice"]
    assert planner.board.banner["buttons"][0]["action"] == "apply"
    planner.board._receive(planner.board, {"type": "press", "action": "apply"}, [])
    assert planner.profile.fits and planner.profile.notes.get("advice") is None
    assert all(
        read_path(written_fields(planner.plan), path) == value
        for path, value in advice["changes"].items()
    )
    assert "Applied" in told(planner)
    assert "apply" not in [b["action"] for b in planner.board.banner["buttons"]]
    planner.undo()
    assert planner.profile.fits is False


def test_cost_and_constraint_stand_beneath_the_charts(planner: Planner) -> None:
    before = planner.reasons.value
    assert (
        "GPU-hours" in before and "kWh" in before and "takes the largest part of a step" in before
    )
    planner.set("strategy", "ddp")
    planner.set("gpu", "v100-sxm2-32gb")
    assert "too much" in planner.reasons.value and planner.reasons.value != before
    assert planner.children.index(planner.reasons) == planner.children.index(planner.board) + 1


def test_one_edit_is_one_estimate(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(plan: Plan) -> Profile:
        calls.append(plan)
        return estimate(plan)

    monkeypatch.setattr("workbench.planner.estimate", counted)
    monkeypatch.setattr("workbench.planner.explain.plan_figures.estimate", counted)
    planner.set("micro_batch", 2)
    assert len(calls) == 1


def test_many_ranks_get_a_map_and_few_lose_it(planner: Planner) -> None:
    planner.set("gpus", 64)
    assert len(planner.board.rows("memory_map")) == 64
    planner.set("gpus", 8)
    assert "memory_map" not in [figure["name"] for figure in planner.board.figures]


def test_a_rehearsal_is_drawn_beside_the_estimate(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(plan: Plan, progress: Cancellable) -> Profile:
        assert planner.profile is not None
        progress(1, 2)
        return Profile("p", "rehearsed", 16, planner.profile.memory.assign(source="rehearsed"))

    monkeypatch.setattr("workbench.runs.launch.subprocess_verbs.rehearse", rehearse)
    planner._rehearse_now(planner.plan, Cancellable(planner._show_progress))
    assert {row["source"] for row in planner.board.rows("memory")} == {"estimated", "rehearsed"}
    planner.set("micro_batch", 2)
    assert {row["source"] for row in planner.board.rows("memory")} == {"estimated"}


def test_a_second_press_cancels_the_rehearsal(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def rehearse(plan: Plan, progress: Cancellable) -> Profile:
        began.set()
        try:
            while True:
                progress(1, 2)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr("workbench.runs.launch.subprocess_verbs.rehearse", rehearse)
    planner._on_press("rehearse")
    assert began.wait(20)
    planner._on_press("rehearse")
    assert ended.wait(20)
    assert planner.rehearsed is None


def test_a_plan_with_an_inline_shape_can_be_planned(planner: Planner) -> None:
    other = Planner(planner.plan.replace(**{"model.layers": 16}))
    other.set("pipeline", 4)
    assert other.plan.resolve().shape.layers == 16


def test_typing_a_number_back_restores_the_plan_whatever_the_page_echoes(planner: Planner) -> None:
    first = planner.plan
    for gpus in ("64", "7", "63", "96", "1e3", "6", "16"):
        stale = planner.panel.get_state()
        send(planner, type="edit", name="gpus", value=gpus, number=1)
        planner.panel.set_state(
            {key: stale[key] for key in planner.panel.keys if not key.startswith("_")}
        )
    assert planner.plan == first and planner.problems == []


def test_what_is_asked_outlives_numbers_that_it_does_not_go_with(planner: Planner) -> None:
    planner.set("tensor", 4)
    wanted = planner.plan
    for gpus in (9, 7, 18):
        planner.set("gpus", gpus)
        assert planner.problems and planner.plan == wanted
        assert shown(planner, "tensor")["value"] == 4 and shown(planner, "gpus")["text"] == str(
            gpus
        )
    planner.set("gpus", 16)
    assert planner.plan == wanted and planner.problems == []


def test_a_problem_is_named_and_marked_and_a_preset_a_step_back_or_reset_mends_it(
    planner: Planner,
) -> None:
    first = planner.plan
    ways = (lambda: planner.set("strategy", "zero-3"), planner.undo, planner.reset)
    for way in ways:
        planner.set("tensor", 5)
        assert headline(planner).startswith("Not a legal plan: fix Number of GPUs")
        assert "tensor 5" in shown(planner, "gpus")["problem"] and "cluster.gpus" in told(planner)
        way()
        assert planner.problems == [] and headline(planner).startswith("Fits")
    assert planner.plan == first


def test_a_problem_without_a_control_is_shown_in_the_banner() -> None:
    planner = Planner(Plan.of("tiny", gpus=2, strategy="ddp").replace(**{"corpus.holdout": 0.0}))
    send(
        planner,
        type="upload",
        name="mine.yaml",
        text=planner.plan.to_yaml() + "\ntelemetry: {timeout_seconds: 0}\n",
    )
    assert "telemetry.timeout_seconds" in told(planner)
    assert planner.problems == []
    wrong = planner.plan.replace(**{"training.evaluation.every": 5})
    send(planner, type="upload", name="mine.yaml", text=wrong.to_yaml())
    assert headline(planner) == "Not a legal plan: fix corpus.holdout"
    send(planner, type="undo")
    assert planner.problems == []


def test_a_default_that_is_set_overrides_the_preset(planner: Planner) -> None:
    assert planner.plan.resolve().strategy.pipeline.size > 1
    planner.set("pipeline", 1)
    assert (
        planner.plan.resolve().strategy.pipeline.size == 1
        and shown(planner, "pipeline")["origin"] == ""
    )


def test_undo_goes_back_step_by_step_and_reset_to_the_start(planner: Planner) -> None:
    plans = [planner.plan]
    for name, value in (("tensor", 2), ("micro_batch", 2), ("gpus", 32)):
        planner.set(name, value)
        plans.append(planner.plan)
    planner.set("gpus", "")
    for plan in reversed(plans):
        send(planner, type="undo")
        assert planner.plan == plan and planner.problems == []
    assert not planner.panel.shown["undo"] and not planner.panel.shown["reset"]
    planner.set("tensor", 2)
    send(planner, type="reset")
    assert planner.plan == plans[0]
    send(planner, type="undo")
    assert planner.plan == plans[1]


def test_a_plan_file_is_loaded_and_reset_goes_back_to_it(planner: Planner, tmp_path: Path) -> None:
    other = Plan.of("tiny", gpus=4, strategy="zero-2")
    (tmp_path / "other.yaml").write_text(other.to_yaml())
    first = planner.plan
    send(planner, type="path", value=str(tmp_path / "other.yaml"))
    send(planner, type="load")
    assert planner.plan == other and "Loaded" in told(planner)
    planner.set("micro_batch", 2)
    planner.reset()
    assert planner.plan == other
    for _ in range(3):
        planner.undo()
    assert planner.plan == first


def test_a_plan_file_that_cannot_be_read_is_reported_and_changes_nothing(
    planner: Planner, tmp_path: Path
) -> None:
    first = planner.plan
    send(planner, type="path", value=str(tmp_path / "absent.yaml"))
    send(planner, type="load")
    assert "absent.yaml" in told(planner) and planner.plan == first
    send(planner, type="upload", name="broken.yaml", text="model: [")
    assert (
        "broken.yaml" in told(planner) and planner.plan == first and not planner.panel.shown["undo"]
    )


def test_the_micro_batch_leaves_the_global_batch(planner: Planner) -> None:
    assert shown(planner, "global_batch") == {
        "value": 64,
        "text": "64",
        "origin": "auto",
        "problem": "",
    }
    planner.set("micro_batch", 2)
    assert planner.plan.resolve().training.global_batch == 64 and "stays 64" in told(planner)
    planner.set("global_batch", "")
    assert planner.plan.resolve().training.global_batch == 128
    assert shown(planner, "global_batch")["origin"] == "auto"


@pytest.mark.parametrize("edit", [("gpus", 32), ("micro_batch", 2), ("strategy", "colossal-2d")])
def test_the_global_batch_is_held_and_not_left_behind(
    planner: Planner, edit: tuple[str, Any]
) -> None:
    start, back = planner.plan, {"gpus": 16, "micro_batch": "", "strategy": "megatron-3d"}
    planner.set(*edit)
    assert planner.problems == [] and planner.plan.resolve().training.global_batch == 64
    assert shown(planner, "global_batch")["origin"] == "held" and "stays 64" in told(planner)
    planner.set(edit[0], back[edit[0]])
    assert planner.plan == start and shown(planner, "global_batch")["origin"] == "auto"


def test_presets_in_turn_leave_no_global_batch_that_nobody_chose(planner: Planner) -> None:
    for preset in ("colossal-2d", "zero-3", "megatron-tp", "dapple", "colossal-3d", "ddp"):
        planner.set("strategy", preset)
        assert planner.problems == [] and planner.plan.resolve().training.global_batch == 64
    assert "global_batch" not in planner.plan.to_yaml()


def test_a_global_batch_comes_back_once_it_is_legal_again_chosen_or_not(planner: Planner) -> None:
    planner.set("global_batch", 60)
    for batch, gpus in ((60, 32), (60, 16)):
        planner.set("gpus", gpus)
        assert planner.plan.resolve().training.global_batch == batch
    planner.set("micro_batch", 7)
    assert planner.plan.resolve().training.global_batch == 56
    assert "Global batch 60 → 56" in told(planner)
    assert "is 60, not a multiple of micro-batch 7 x data-parallel size 2" in told(planner)
    planner.set("micro_batch", 1)
    assert planner.plan.training.global_batch == 60


def test_a_global_batch_that_becomes_illegal_moves_to_the_nearest_and_is_reported(
    planner: Planner,
) -> None:
    planner.set("micro_batch", 12)
    assert planner.problems == [] and planner.plan.resolve().training.global_batch == 72
    assert "Global batch 64 → 72" in told(planner)


@pytest.mark.parametrize(
    ("typed", "value"),
    [("1e3", 1000), ("1,024", 1024), (" 64 ", 64), ("64.0", 64)],
    ids=lambda value: str(value),
)
def test_a_number_is_read_as_people_write_it(planner: Planner, typed: str, value: int) -> None:
    planner.set("global_batch", typed)
    assert planner.plan.training.global_batch == value


@pytest.mark.parametrize("typed", ["", "abc", "2.5", "1e400", "-"])
def test_text_that_is_no_number_stays_and_is_reported(planner: Planner, typed: str) -> None:
    first = planner.plan
    planner.set("gpus", typed)
    assert (
        shown(planner, "gpus")["text"] == typed
        and "whole number" in shown(planner, "gpus")["problem"]
    )
    planner.set("tensor", 2)  # another edit does not hide it
    assert (
        headline(planner) == "Not a legal plan: fix Number of GPUs"
        and shown(planner, "gpus")["text"] == typed
    )
    planner.set("gpus", "16")
    assert planner.problems == [] and planner.plan == first.replace(
        **{"strategy.tensor.size": 2, "cluster.gpus": 16}
    )


@pytest.mark.parametrize("preset", ["colossal-2d", "colossal-2.5d", "colossal-3d"])
def test_a_preset_brings_what_it_needs_and_reports_it(preset: str) -> None:
    plan = Plan.of(
        "llama-3-8b",
        gpu="h100-sxm-80gb",
        gpus=64,
        strategy="megatron-3d",
        set={"training.micro_batch": 1},
    )
    planner = Planner(plan)
    planner.set("strategy", preset)
    assert planner.problems == [] and planner.plan.strategy.preset == preset
    assert planner.plan.resolve().training.micro_batch > 1 and "Micro batch 1 → " in told(planner)
    assert planner.plan.resolve().training.global_batch == 256


def test_schedules_and_grids_bring_their_sizes(planner: Planner) -> None:
    planner.set("tensor", 4)
    planner.set("schedule", "zb-v")
    assert (
        planner.problems == []
        and planner.plan.strategy.pipeline.chunks == 2
        and "Chunks 1 → 2" in told(planner)
    )
    planner.set("schedule", "1f1b")
    planner.set("algorithm", "2d")
    assert planner.problems == [] and planner.plan.strategy.tensor.size == [2, 2]
    assert [text for text, _ in shown(planner, "tensor")["options"]] == ["1 × 1", "2 × 2", "4 × 4"]


CHANGES = {
    "attention": "math",
    "nodes": 4,
    "gpus_per_node": 4,
    "fabric": "dgx-a100",
    "schedule": "gpipe",
    "chunks": 1,
    "partition": "15, 17",
    "sequence_parallel": True,
    "context": 2,
    "context_algorithm": "ulysses",
    "ulysses_size": 2,
    "shard": 2,
    "placement": ["tensor", "pipeline", "context", "data"],
    "offload": "none",
    "reduce": "microbatch",
    "bucket": "50",
    "overlap": False,
    "keep_gathered": False,
    "kernels": "fused",
    "head_loss": "whole",
    "gradient_dtype": "fp32",
    "optimizer": "sgd",
    "moments": "bf16",
    "master": "none",
    "learning_rate": "1e-4",
    "algorithm": "1d",
    "experts": 1,
    "calibration": "",
    "method": "full",
    "base": "weights",
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_targets": "attention",
    "base_format": "int4",
    "base_group": 128,
    "preference_beta": 0.2,
}


@pytest.mark.parametrize("name", [name for name, knob in plan_controls().items() if knob.group])
def test_every_folded_control_sets_its_field(planner: Planner, name: str) -> None:
    if name == "preference_beta":
        planner = Planner(planner.plan.replace(**{"corpus.format": "preferences"}))
    planner.set("zero", 1)
    planner.set(name, CHANGES[name])
    assert planner.problems == []
    value = read_path(written_fields(planner.plan), plan_controls()[name].path)
    if name == "calibration":
        assert shown(planner, name)["origin"] == "auto"
    else:
        assert value == {"partition": [15, 17], "bucket": 50.0, "learning_rate": 1e-4}.get(
            name, CHANGES[name]
        )
        assert shown(planner, name)["value"] == value and shown(planner, name)["origin"] == ""


def test_what_a_slider_offers_is_legal(planner: Planner) -> None:
    for name in ("tensor", "pipeline", "context", "experts"):
        for _, value in shown(planner, name).get("options", []):
            planner.set(name, value)
            about = [
                problem
                for problem in planner.problems
                if problem.field == plan_controls()[name].path
            ]
            assert about == [], (name, value)
            planner.undo()


def test_a_controls_hint_is_the_schemas_description(planner: Planner) -> None:
    for group in planner.panel.groups:
        for field in group["fields"]:
            assert field["label"] and field["hint"].startswith(
                f"{plan_controls()[field['name']].path}: "
            )


def test_a_name_that_is_no_control_is_refused(planner: Planner) -> None:
    with pytest.raises(PlanError, match="is no control of the planner"):
        planner.set("tensors", 2)


def test_edits_of_a_cell_and_of_the_page_at_the_same_time_are_both_kept(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def slow(*arguments: Any) -> Plan:
        begun.set()
        time.sleep(0.3)  # an edit that does not wait for its turn comes in meanwhile
        return apply_edit(*arguments)

    monkeypatch.setattr("workbench.lab.panel.planner.apply_edit", slow)
    edit = {"type": "edit", "name": "sequence_length", "value": "1024"}
    page = threading.Thread(target=send, args=(planner,), kwargs=edit)
    page.start()
    assert begun.wait(10)
    planner.set("micro_batch", 2)
    page.join(10)
    training = planner.plan.resolve().training
    assert (training.sequence_length, training.micro_batch) == (1024, 2)


TIMES = re.compile(r"step time|MFU|tokens/s|\$|GPU-hours|\d m?s\b", re.IGNORECASE)


@pytest.mark.parametrize("strategy", ["ddp", "gpipe", "ring-attention"])
def test_what_does_not_fit_shows_no_time_on_any_screen(strategy: str) -> None:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy=strategy)
    planner, profile = Planner(plan), estimate(plan)
    assert profile.fits is False
    for shown in (told(planner), planner.reasons.value, repr(profile), profile._repr_html_()):
        assert not TIMES.search(re.sub(r"font-size:[^;]*;|step time by", "", shown)), shown
    for name in ("parts", "timeline"):
        (figure,) = (found for found in planner.board.figures if found["name"] == name)
        assert planner.board.rows(name) == [] and "does not fit" in figure["empty"]
    comparison = compare(plan)
    (row,) = comparison_tables.text_rows(*comparison.tables[0][1:])
    cells = dict(row)
    assert {cells[name] for name in ("step_seconds", "tokens_per_second")} == {"–"}
    assert "step_seconds_90" not in cells and cells["state"] == "does not fit"
    assert not {figure.name.split("_")[0] for figure in comparison.figures()} & {
        "parts",
        "timeline",
    }
    assert comparison.to_json()["summary"][0]["step_seconds"] == profile.step_seconds


@pytest.mark.parametrize("strategy", ["ddp", "gpipe", "ring-attention"])
def test_times_of_a_plan_that_does_not_fit_say_so(strategy: str, ask: Ask, tmp_path: Path) -> None:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy=strategy)
    assert estimate(plan).notes["memory"]["expected_slowdown"] is None
    said = "(estimated, of a plan that does not fit)"
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    _, table, _ = ask("estimate", tmp_path / "plan.yaml")
    for row in ("step time", "tokens/s"):
        (line,) = (x for x in table.splitlines() if x.strip().split("  ")[0] == row)
        assert line.rstrip().endswith("of a plan that does not fit")
    assert "retries" not in table
    found = explain(plan)
    assert said in found.step_line and said in repr(found)


def test_times_of_a_plan_that_fits_say_nothing_of_it() -> None:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3")
    profile = estimate(plan)
    assert profile.fits and profile.source_words == "estimated"
    assert profile.notes["memory"]["expected_slowdown"] >= 1
    assert "does not fit" not in repr(compare(plan)) + repr(explain(plan))
