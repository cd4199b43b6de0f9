"""gpt-neox's YAML, read as a plan."""

from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, NEOX, ON_8, SAMPLES, left, load, problems
from workbench import interop
from workbench.interop.foreign_keys import flat
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.safe_io import yaml_files


def test_a_gpt_neox_yaml_holds_shape_strategy_and_training() -> None:
    found = load("gpt_neox.yml", gpus=16)
    full, optimizer = found.plan.resolve(), found.plan.training.optimizer
    assert (found.format, full.strategy.stack) == ("gpt-neox", "deepspeed-3d")
    shape = full.shape
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab) == (
        24,
        1024,
        16,
        4096,
        50257,
    )
    assert (shape.norm, shape.norm_epsilon, shape.positions, shape.mlp) == (
        "rmsnorm",
        1e-6,
        "rope",
        "gelu",
    )
    assert (shape.biases, shape.tied, shape.unmodelled) == ("all", False, None)
    assert full.sizes == {"tensor": 2, "context": 1, "data": 4, "pipeline": 2}
    assert (full.strategy.data.zero, full.strategy.data.overlap, full.strategy.recompute) == (
        1,
        True,
        "full",
    )
    assert (full.strategy.precision, full.strategy.gradient_dtype) == ("bf16", "bf16")
    assert full.strategy.data.bucket_mib == 2e8 * 2 / 2**20
    assert (full.training.global_batch, full.training.micro_batch, full.training.dropout) == (
        4 * 8 * 4,
        4,
        0.1,
    )
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (
        2e-4,
        0.98,
        0.05,
        1.0,
    )
    assert (optimizer.decay, optimizer.warmup_steps, optimizer.final_ratio) == ("cosine", 20, 0.1)
    assert (full.training.steps, full.training.evaluation.every, full.training.sequence_length) == (
        1000,
        100,
        1024,
    )
    told = {*found.translated, *left(found)}
    keys = {*flat(yaml_files.parse((SAMPLES / "gpt_neox.yml").read_text()))}
    assert keys == told and set(left(found)) == {
        "tokenizer_type",
        "scaled-upper-triang-masked-softmax-fusion",
        "fp16.loss_scale",
        "data-path",
    }


@pytest.mark.parametrize(
    "more, width",
    [
        ({}, 256),
        ({"activation": "swiglu", "mlp_multiple_of": 256, "intermediate_size": 32768}, 11008),
        ({"activation": "silu", "mlp_type": "llama", "hidden_size": 4096}, 11008),
        ({"activation": "silu", "mlp_type": "llama", "intermediate_size": 14336}, 14336),
        ({"expansion_factor": 3}, 192),
        ({"activation": "geglu", "intermediate_size": 768}, 256),
    ],
)
def test_widths_of_gpt_neox(more: dict[str, Any], width: int) -> None:
    assert read_gpt_neox.read({**NEOX, **more}, ON_8).plan.resolve().shape.ffn == width


def test_what_gpt_neox_computes_beyond_a_shape_is_told() -> None:
    odd = {"use_qk_layernorm": True, "use_bias_in_attn_linear": False}
    words = read_gpt_neox.read({**NEOX, **odd}, ON_8).plan.resolve().shape.unmodelled
    assert words == "use_qk_layernorm true; biases in attention or in the feed-forward layers only"


@pytest.mark.parametrize(
    "more, field, words",
    [
        ({"pos_emb": "rpe"}, "pos_emb", "legal: learned, rotary, alibi"),
        ({"num-layers": 3}, "num-layers", "twice"),
        ({"num_experts": 4}, "num_experts", "--model"),
        ({"model_parallel_size": 3}, "gpus", "= 3 does not divide"),
        ({"precision": "fp32", "bf16": {"enabled": True}}, "precision", "bf16 is enabled"),
        ({"optimizer": {"type": "sm3"}}, "optimizer.type", "legal: Adam"),
        ({"hiden_size": 4}, "hiden_size", "did you mean"),
        (
            {"padded_vocab_size": None, "tokenizer_type": "HFTokenizer"},
            "padded_vocab_size",
            "--vocab-size",
        ),
    ],
)
def test_gpt_neox_refused_by_name(more: dict[str, Any], field: str, words: str) -> None:
    assert words in problems(read_gpt_neox.read, {**NEOX, **more}, ON_8)[field]


def test_gpt_neox_takes_a_vocabulary_or_a_model_from_beside() -> None:
    text = yaml_files.dump(
        {key: value for key, value in NEOX.items() if key != "padded_vocab_size"}
    )
    assert (
        interop.read(text, gpu=GPU_NAME, gpus=8, vocab_size=50304).plan.resolve().shape.vocab
        == 50304
    )
    found = interop.read(text, gpu=GPU_NAME, gpus=8, model="tiny")
    assert found.plan.model == "tiny" and left(found)["hidden_size"] == 64
