"""The planner's panel of a plan that fine-tunes: its method is a control, those of batch and
optimizer are the fine-tuning's own, and what a change of the method takes out comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.lab.panel.edit_history import RequestedPlan
from workbench.lab.panel.finetune_edits import finetune_edit, finetune_fields
from workbench.lab.panel.plan_controls import plan_controls
from workbench.lab.panel.planner import Planner
from workbench.lab.panel.typed_values import AUTO
from workbench.plan.schema import Plan, build_plan

TASK = {"sequence_length": 1024, "micro_batch": 2, "global_batch": 64}
CLUSTER = {"gpu": "h100-sxm-80gb", "gpus": 8}
PLAN = {"model": "llama-3.2-1b", "cluster": CLUSTER, "strategy": {"preset": "zero-3"}}
ADAPTERS: dict[str, Any] = {
    "lora": {"rank": 16, "alpha": 32.0, "targets": "attention", "dropout": 0.1},
    "quantize": {"format": "int4", "group": 32, "double": False},
    "adapter": "mine",
}
FINETUNE: dict[str, Any] = {
    "method": "lora",
    "base": "weights",
    "base_sha256": "0" * 64,
    "preference": {"beta": 0.3},
    **ADAPTERS,
}


@pytest.fixture
def planner() -> Planner:
    return Planner(build_plan(PLAN | {"finetune": TASK}))


def shown(planner: Planner, name: str) -> dict[str, Any]:
    return dict(planner.panel.shown["fields"][name])


def problem(planner: Planner, name: str) -> str:
    return str(shown(planner, name)["problem"])


def values(planner: Planner) -> list[Any]:
    return [shown(planner, name)["value"] for name in ("method", "lora_rank", "base_format")]


def edited(*edits: tuple[str, Any], start: dict[str, Any] = FINETUNE) -> Plan:
    """The plan after edits of its fine-tuning, name and value."""
    requested = RequestedPlan(build_plan(PLAN | {"finetune": TASK | start}))
    for name, value in edits:
        plan = finetune_edit(requested.plan, plan_controls()[name], value, requested.memory)
        requested = requested.with_plan(name, plan)
    return requested.plan


def test_fields_of_the_task_are_the_fine_tunings(planner: Planner) -> None:
    for name, value in TASK.items():
        assert shown(planner, name)["value"] == value and shown(planner, name)["origin"] == ""
    planner.set("global_batch", 63)
    assert "63" in problem(planner, "global_batch")
    planner.set("global_batch", 32)
    assert planner.problems == [] and planner.plan.task.global_batch == 32
    planner.set("sequence_length", "")
    assert "sequence_length" not in planner.plan.model_dump(exclude_unset=True)["finetune"]


def test_a_method_is_chosen(planner: Planner) -> None:
    assert values(planner) == ["lora", 8, None]
    planner.set("lora_rank", 16)
    planner.set("base_format", "int4")
    assert planner.problems == [] and values(planner) == ["lora", 16, "int4"]
    assert planner.plan.lora.rank == 16 and planner.plan.finetune.quantize.format == "int4"
    planner.set("base_format", None)
    assert values(planner) == ["lora", 16, None]
    planner.set("method", "full")
    assert planner.problems == [] and values(planner) == ["full", None, None]
    assert planner.plan.finetune.lora is None
    planner.set("method", None)
    assert planner.plan.finetune is None and values(planner) == [None, None, None]
    planner.undo()
    planner.set("method", "lora")
    assert any("LoRA rank none → 16" in line for line in planner.board.banner["lines"])
    planner.set("method", None)
    words = "Method none: pre-training also changed: LoRA rank 16 → none"
    assert any(line.startswith(words) for line in planner.board.banner["lines"])
    assert planner.plan.task.micro_batch == 2
    planner.set("base_format", "nf4")
    assert planner.problems == [] and values(planner) == ["lora", 16, "nf4"]
    for _ in range(6):
        planner.undo()
    planner.set("method", "lora")
    assert values(planner) == ["lora", 16, None]  # what undo took back is not remembered
    planner.reset()
    planner.set("method", "full")
    planner.set("method", "lora")
    assert values(planner) == ["lora", 8, None]


@pytest.mark.parametrize(
    "methods",
    [("full", "lora"), (None, "lora"), (None, "full", "lora"), ("full", None, None, "lora")],
    ids=str,
)
def test_what_a_method_has_comes_back_with_it(methods: tuple[str | None, ...]) -> None:
    assert finetune_fields(edited(*(("method", name) for name in methods))) == FINETUNE


def test_full_fine_tuning_has_none_of_the_adapters() -> None:
    left = {name: value for name, value in FINETUNE.items() if name not in ADAPTERS}
    for methods in (["full"], [None, "full"]):
        plan = edited(*(("method", name) for name in methods))
        assert finetune_fields(plan) == left | {"method": "full"}
    plan = edited(("method", "full"), ("method", None), ("base", "other"))
    assert finetune_fields(plan) == {"method": "full", "base": "other", "preference": {"beta": 0.3}}


def test_a_field_of_another_method_brings_the_rest_of_that_method() -> None:
    for away in ("full", None):
        plan = edited(("method", away), ("lora_rank", 4))
        assert finetune_fields(plan) == FINETUNE | {"lora": ADAPTERS["lora"] | {"rank": 4}}
    plan = edited(("base_format", None), ("method", "full"), ("base_group", 128))
    assert finetune_fields(plan) == FINETUNE | {"quantize": ADAPTERS["quantize"] | {"group": 128}}


def test_a_cleared_field_does_not_come_back() -> None:
    cleared = [
        ("base", AUTO),
        ("preference_beta", AUTO),
        ("lora_rank", AUTO),
        ("base_format", None),
    ]
    plan = edited(*cleared, ("method", "full"), ("method", None), ("method", "lora"))
    assert finetune_fields(plan) == {
        "method": "lora",
        "lora": {name: value for name, value in ADAPTERS["lora"].items() if name != "rank"},
        "quantize": None,
        "adapter": "mine",
    }
    assert finetune_fields(edited(("method", None), ("lora_rank", AUTO))) == {}
    assert finetune_fields(edited(("base_format", None), start={})) == {}


def test_the_group_of_a_4_bit_base_outlives_its_format() -> None:
    four_bit = ADAPTERS["quantize"] | {"format": "nf4"}
    assert finetune_fields(edited(("base_format", "nf4"))) == FINETUNE | {"quantize": four_bit}
    plan = edited(("base_format", None), ("base_format", "nf4"))
    assert finetune_fields(plan) == FINETUNE | {"quantize": four_bit}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("4096", "more than the rank of"),
        ("0", "must be above 0"),
        ("two", "legal: a whole number"),
        ("2.5", "legal: a whole number"),
    ],
)
def test_an_illegal_rank_is_said_beside_it(planner: Planner, typed: str, message: str) -> None:
    first = planner.plan
    planner.set("lora_rank", "4096")
    planner.set("lora_rank", typed)
    assert message in problem(planner, "lora_rank") and planner.plan == first
    assert problem(planner, "lora_rank").count("; ") == len(planner.problems) == 1
    assert shown(planner, "lora_rank")["text"] == typed
    planner.set("method", "full")
    assert planner.problems == [] and shown(planner, "lora_rank")["text"] == ""
    assert shown(planner, "lora_rank")["origin"] == "none"
    planner.reset()
    assert planner.problems == [] and planner.plan == first


def test_problems_of_fine_tuning_stand_at_its_controls(planner: Planner, tmp_path: Path) -> None:
    planner.set("preference_beta", "0.1")
    assert "legal: corpus.format" in problem(planner, "preference_beta")
    planner.set("preference_beta", "")
    assert planner.problems == [] and planner.plan.finetune.preference is None
    planner.set("base", str(tmp_path))
    assert str(tmp_path) in problem(planner, "base")
    planner.set("base", "absent.gguf")
    assert planner.problems == [] and planner.plan.finetune.base == "absent.gguf"
    assert any("absent.gguf' is not on this" in line for line in planner.board.banner["lines"])
    planner.set("base", "")
    assert planner.plan.finetune.base is None
    planner.set("base_format", "nf4")
    planner.set("base_group", 128)
    assert planner.problems == [] and planner.plan.finetune.quantize.group == 128
    planner.set("model", "tiny")
    planner.set("tensor", 2)
    assert "is 128, which does not divide the columns" in problem(planner, "base_group")
    planner.set("base_group", 32)
    assert problem(planner, "base_group") == ""
    planner.set("algorithm", "2d")
    assert "but a grid of 2d moves parts of weights" in problem(planner, "base_format")
    planner.reset()
    planner.set("lora_targets", "attention.[qv], nothing")
    assert "nothing" in problem(planner, "lora_targets")
    planner.set("lora_targets", "attention.[qv]")
    assert planner.problems == [] and planner.plan.lora.targets == ["attention.[qv]"]
    assert shown(planner, "lora_targets")["text"] == "attention.[qv]"


def test_reasons_say_what_the_method_saves(planner: Planner) -> None:
    assert "Method: LoRA rank 8, beside full fine-tuning" in planner.reasons.value
    planner.set("method", "full")
    assert "Method:" not in planner.reasons.value
