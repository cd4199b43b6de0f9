"""What the method of a fine-tuning saves: `explain` has the figures of both plans' estimates."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.explain import explain
from workbench.planner.explain.method_savings import MethodFigures
from workbench.planner.methods.finetune_methods import method_plan
from workbench.units import duration_text, gib_text

NF4: dict[str, Any] = {"finetune.quantize": {}}


def tuned(strategy: str, model: str = "llama-3.2-1b", **sets: Any) -> Plan:
    task = {"finetune.sequence_length": 1024, "finetune.global_batch": 64}
    plan = Plan.of(model, gpu="h100-sxm-80gb", gpus=8, strategy=strategy)
    return plan.replace(**{**task, **sets})


def assert_is_the_estimate(one: MethodFigures, plan: Plan) -> None:
    """Of a plan; offloaded states are counted as others."""
    found = estimate(plan)
    states, calls = found.memory[found.memory.moment == "after_optimizer"], found.collectives
    for name, held in {"parameters": ["parameters"], "optimizer": ["optimizer", "master"]}.items():
        rows = states[states.category.isin(held)]
        most = rows.groupby("rank").bytes.sum().max()
        assert getattr(one.states, name) == pytest.approx(most, abs=4096)
    moved = (calls.bytes * calls["count"]).groupby(calls["rank"]).sum().max()
    assert one.collective_bytes == pytest.approx(moved, rel=1e-9)
    assert one.figures.seconds == pytest.approx(found.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "sets"),
    [
        ("zero-3", {}),
        ("megatron-sp", NF4),
        ("zero-2", {"finetune.lora.targets": ["blocks.1[45].*"]}),
        ("zero-offload", {}),
    ],
)
def test_savings_are_of_the_estimates_of_both_plans(strategy: str, sets: dict[str, Any]) -> None:
    plan = tuned(strategy, **sets)
    found = explain(plan)
    saved, full = found.savings, method_plan(plan, "full")
    assert saved is not None
    assert_is_the_estimate(saved.own, plan)
    assert_is_the_estimate(saved.full, full)
    for one in (saved.own, saved.full):
        for text in (gib_text(one.states.total), duration_text(one.figures.seconds)):
            assert text in saved.sentence
    assert saved.sentence in repr(found) and "Method: LoRA rank 8" in found._repr_html_()
    assert json.loads(json.dumps(found.to_json()))["savings"]["own"]["step_seconds"] > 0


@pytest.mark.parametrize(
    ("model", "strategy", "says"),
    [
        ("llama-3-8b", "ddp", r"fit: \d\S+ GiB of a GPU's 79.3 GiB \(estimated\)\.$"),
        ("llama-3.1-405b", "zero-infinity", "fit: it offloads more than the host's memory.$"),
        ("llama-3-8b", "zero-3", None),
    ],
)
def test_full_fine_tuning_that_does_not_fit_is_said(
    model: str, strategy: str, says: str | None
) -> None:
    saved = explain(tuned(strategy, model, **{"strategy.recompute": "full"})).savings
    assert saved is not None and saved.own.figures.fits
    found = re.search(r"Full fine-tuning does not (.*)", saved.sentence)
    assert (found and re.match(says, found[1])) if says else found is None


def test_only_adapters_save() -> None:
    training = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp")
    for plan in (training, tuned("zero-3", **{"finetune.method": "full"})):
        found = explain(plan)
        assert found.savings is None and "savings" not in found.to_json()
        assert "Method:" not in repr(found)
