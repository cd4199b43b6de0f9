"""The planner's panel of a plan that fine-tunes: its method is a control, and those of batch and
optimizer are the fine-tuning's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.lab.panel.planner import Planner
from workbench.plan.schema import Plan

TASK = {"sequence_length": 1024, "micro_batch": 2, "global_batch": 64}


@pytest.fixture
def planner() -> Planner:
    cluster = {"gpu": "h100-sxm-80gb", "gpus": 8}
    written = {"model": "llama-3.2-1b", "cluster": cluster, "strategy": {"preset": "zero-3"}}
    return Planner(Plan.model_validate(written | {"finetune": TASK}))


def shown(planner: Planner, name: str) -> dict[str, Any]:
    return dict(planner.panel.shown["fields"][name])


def values(planner: Planner) -> list[Any]:
    return [shown(planner, name)["value"] for name in ("method", "lora_rank", "base_format")]


def test_fields_of_the_task_are_the_fine_tunings(planner: Planner) -> None:
    for name, value in TASK.items():
        assert shown(planner, name)["value"] == value and shown(planner, name)["origin"] == ""
    planner.set("global_batch", 63)
    assert "63" in shown(planner, "global_batch")["problem"]
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
    assert planner.plan.task.micro_batch == 2
    planner.set("base_format", "nf4")
    assert planner.problems == [] and values(planner) == ["lora", 8, "nf4"]


def test_a_rank_that_is_too_large_is_said_beside_it(planner: Planner) -> None:
    planner.set("lora_rank", 4096)
    assert "more than the rank of" in shown(planner, "lora_rank")["problem"]


def test_reasons_say_what_the_method_saves(planner: Planner) -> None:
    assert "Method: LoRA rank 8, beside full fine-tuning" in planner.reasons.value
    planner.set("method", "full")
    assert "Method:" not in planner.reasons.value
