"""Attention and loss that a foreign file states are fields of the plan, read and written."""

from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, LLAMA, NEOX, ON_8
from workbench import interop
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.plan.schema import Plan


@pytest.mark.parametrize(
    ("arguments", "attention", "loss"),
    [
        ((), "auto", "auto"),
        (("--use-flash-attn",), "flash-2", "auto"),
        (("--use-flash-attn-v1",), "flash-1", "auto"),
        (("--attention-backend", "auto", "--use-flash-attn"), "flash-2", "auto"),
        (("--attention-backend", "fused"), "cudnn-9", "auto"),
        (("--attention-backend", "local"), "unfused", "auto"),
        (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"), "auto", "auto"),
        (("--cross-entropy-fusion-impl", "linear"), "auto", "auto"),
        (
            ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear"),
            "auto",
            "fused_linear",
        ),
    ],
)
def test_megatrons_words_are_fields(arguments: Any, attention: str, loss: str) -> None:
    plan = read_megatron.read([*LLAMA, *arguments], ON_8).plan
    assert (plan.strategy.attention, plan.strategy.loss) == (attention, loss)


def test_a_backend_that_is_left_open_is_the_profiles() -> None:
    words = " ".join(str(word) for word in LLAMA)
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {words} --attention-backend $BACKEND"
    found = interop.read(script, gpu=GPU_NAME, gpus=8)
    assert found.plan.strategy.attention == "auto"
    reasons = {note.field: note.why for note in found.untranslated}
    assert "strategy.attention" in reasons["--attention-backend"]


@pytest.mark.parametrize(
    ("kinds", "attention"),
    [
        ([[["flash"], 2]], "flash-2"),
        ([[["global"], 2]], "auto"),
        ([[["flash", "global"], 1]], "auto"),
    ],
)
def test_gpt_neoxs_kinds_of_attention_are_a_field(kinds: Any, attention: str) -> None:
    plan = read_gpt_neox.read(NEOX | {"attention_config": kinds}, ON_8).plan
    assert plan.strategy.attention == attention


@pytest.mark.parametrize(
    ("attention", "loss"),
    [("flash-2", "auto"), ("cudnn-9", "fused_linear"), ("unfused", "auto"), ("auto", "auto")],
)
def test_megatron_is_written_with_them(attention: str, loss: str) -> None:
    stated = {"strategy.stack": "megatron", "strategy.kernels": "fused"}
    stated |= {"strategy.attention": attention, "strategy.loss": loss}
    plan = Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=8, strategy="zero-1", set=stated)
    written = interop.write(plan, "megatron")
    assert not {note.field for note in written.untranslated} & {
        "strategy.attention",
        "strategy.loss",
    }
    back = interop.read(written.text, gpu=GPU_NAME, gpus=8).plan
    assert (back.strategy.attention, back.strategy.loss) == (attention, loss)


def test_a_generation_that_megatron_cannot_say_is_named() -> None:
    stated = {"strategy.stack": "megatron", "strategy.attention": "flash-3"}
    plan = Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=8, strategy="zero-1", set=stated)
    written = interop.write(plan, "megatron")
    lost = {note.field: note.why for note in written.untranslated}
    assert "generation" in lost["strategy.attention"]
