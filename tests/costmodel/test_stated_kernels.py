"""Attention, kernels and loss that a plan states, of stacks whose own are others."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.costmodel.frameworks.framework_profile import (
    DEFAULT_FRAMEWORK,
    framework_profile,
    framework_table,
)
from workbench.plan.catalog import catalog
from workbench.plan.schema import Plan
from workbench.profile import Profile

FOREIGN = sorted(set(framework_table()) - {DEFAULT_FRAMEWORK})


TOKENS = 8 * 4096


def profile(stack: str, **stated: str) -> Profile:
    """The estimate of four layers of Llama 3 8B under a stack."""
    strategy = {"strategy.stack": stack, "strategy.recompute": "none"}
    strategy |= {f"strategy.{name}": value for name, value in stated.items()}
    training = {"training.sequence_length": 4096, "training.micro_batch": 8}
    model = {"model": catalog.models()["llama-3-8b"].shape.model_dump() | {"layers": 4}}
    written = model | strategy | training
    return wb.estimate(Plan.of("tiny", gpu="h100-sxm-80gb", gpus=8, strategy="ddp", set=written))


def answer(stack: str, **stated: str) -> tuple[float, float]:
    """(peak in bytes, step in seconds)."""
    found = profile(stack, **stated)
    peak = found.memory[found.memory.moment == "peak"].groupby("rank").bytes.sum().max()
    return float(peak), float(found.steps.seconds.iloc[-1])


def activations(found: Profile) -> float:
    """Bytes of activations at the peak."""
    rows = found.memory[(found.memory.moment == "peak") & (found.memory.category == "activations")]
    return float(rows.bytes.max())


@pytest.mark.parametrize("stack", FOREIGN)
def test_stating_what_a_stack_runs_changes_nothing(stack: str) -> None:
    usual = framework_profile(stack, "h100-sxm-80gb", "llama-3-8b", "bf16")
    own = {"attention": usual.kernels.attention, "loss": usual.loss.kind}
    assert answer(stack, **own) == answer(stack)


@pytest.mark.parametrize("stack", FOREIGN)
def test_a_plan_states_attention_of_every_stack(stack: str) -> None:
    """Scores in memory cost both; a newer kernel costs time less."""
    unfused, second, third = (
        answer(stack, attention=kind) for kind in ("unfused", "flash-2", "flash-3")
    )
    assert unfused[0] > second[0] == third[0]
    assert unfused[1] > second[1] > third[1]
    assert answer(stack, attention="flash") == second


@pytest.mark.parametrize("stack", FOREIGN)
def test_a_plan_states_the_loss_of_every_stack(stack: str) -> None:
    """Without them the peak falls by logits, at the least in 16 bits, but for gradients of the
    hidden activation and of the head in their place.
    """
    stated = {kind: answer(stack, loss=kind) for kind in ("whole", "chunked", "fused_linear")}
    logits, gradients = TOKENS * 128256 * 2, (TOKENS + 128256) * 4096 * 2
    assert stated["whole"][0] - stated["fused_linear"][0] > logits - gradients
    assert stated["whole"][0] >= stated["chunked"][0]
    assert (stated["whole"][0] == stated["chunked"][0]) == (stack == "litgpt")  # its own figures


@pytest.mark.parametrize("stack", ["hf-trainer", "fsdp", "deepspeed-zero"])
def test_liger_kernels_save_time_and_the_activated_gate(stack: str) -> None:
    eager, liger = (profile(stack, kernels=kind) for kind in ("eager", "liger"))
    gate = 4 * TOKENS * 14336 * 2  # layers x tokens x width, in 16 bits
    assert activations(eager) - activations(liger) == pytest.approx(gate, rel=0.01)
    assert liger.steps.seconds.iloc[-1] < eager.steps.seconds.iloc[-1]
