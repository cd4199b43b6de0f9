"""What was published near a plan: the highest MFU on its GPU, the nearest measured step, and what a
plan is far in from it.
"""

from __future__ import annotations

import math

import pytest

from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.published_steps import (
    MeasuredStep,
    highest_mfu,
    measured_steps,
    published_beside,
)


def plan_of(model: str, gpu: str, gpus: int, strategy: str = "zero-3", stack: str = "") -> Plan:
    changes = {"strategy.stack": stack} if stack else {}
    return Plan.of(model, gpu=gpu, gpus=gpus, strategy=strategy, set=changes)


def test_every_measured_step_is_believable() -> None:
    steps = measured_steps()
    assert len(steps) > 300 and len({tuple(step.to_list()[:-2]) for step in steps}) == len(steps)
    assert all(0 < step.mfu < 1 for step in steps)
    assert all(step.mfu < 0.72 for step in steps if step.gpu.startswith(("a100", "h100", "b200")))


def test_the_highest_mfu_is_of_that_gpu_and_precision_near_that_scale() -> None:
    def step(gpu: str, gpus: int, precision: str, mfu: float) -> MeasuredStep:
        return MeasuredStep(gpu, gpus, 7e9, 4096, "fsdp", precision, mfu, "a", "b")

    steps = [
        step("a", 64, "bf16", 0.4),
        step("a", 8, "bf16", 0.6),
        step("a", 64, "fp8", 0.5),
        step("b", 64, "bf16", 0.7),
    ]
    assert highest_mfu(steps, "a", 128, "bf16") == steps[0]
    assert highest_mfu(steps, "a", 16, "bf16") == steps[1]
    assert highest_mfu(steps, "a", 512, "bf16") is None


def test_a_measured_configuration_extrapolates_nothing() -> None:
    plan = plan_of("llama-3-8b", "h100-sxm-80gb", 128, stack="llm-foundry").replace(
        **{"training.sequence_length": 2048}
    )
    found = published_beside(plan.resolve(), "llm-foundry")
    assert found["extrapolates"] is None
    assert "llm-foundry, 6.66 B parameters on 128 h100-sxm-80gb" in found["nearest"]


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "stack", "words"),
    [
        ("llama-3.1-405b", "h100-sxm-80gb", 16384, "nanotron", "times its GPUs"),
        ("gpt2-xl", "v100-sxm2-32gb", 8, "llm-foundry", "v100-sxm2-32gb instead of its GPU"),
        ("llama-3-8b", "h100-sxm-80gb", 64, "colossalai", "colossalai instead of its framework"),
    ],
)
def test_a_plan_far_from_everything_measured_says_in_what(
    model: str, gpu: str, gpus: int, stack: str, words: str
) -> None:
    plan = plan_of(model, gpu, gpus, stack=stack).resolve()
    assert words in published_beside(plan, stack)["extrapolates"]


def test_an_estimate_shows_it_and_cpu_ranks_have_none() -> None:
    shown = estimate(plan_of("llama-3-8b", "h100-sxm-80gb", 64)).notes["published"]
    assert math.isclose(shown["highest_mfu"], 0.4386, abs_tol=0.02)
    assert "published" not in estimate(plan_of("tiny", "local", 2, "ddp")).notes
