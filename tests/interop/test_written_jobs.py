"""What is written keeps the rules that each framework checks before it starts; the frameworks
themselves are asked in `test_real_consumers.py`.
"""

import shlex
from typing import Any

import pytest

from workbench import interop
from workbench.errors import PlanError
from workbench.plan.schema import Plan

H100 = "h100-sxm-80gb"


def lost(found: interop.Translation) -> dict[str, str]:
    return {note.field: note.why for note in found.untranslated}


def arguments(preset: str, **fields: Any) -> tuple[list[str], interop.Translation]:
    plan = Plan.of("llama-3-8b", gpu=H100, gpus=16, strategy=preset, set=fields)
    found = interop.write(plan, "megatron")
    return shlex.split(found.text.replace("\\\n", " ")), found


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("preset", ["zero-1", "zero-2", "zero-3", "fsdp", "zero-offload"])
def test_megatron_fsdp_has_its_own_checkpoints(preset: str) -> None:
    words, _ = arguments(preset)
    sharded = "--use-megatron-fsdp" in words
    assert sharded == (preset != "zero-1")
    assert ("--ckpt-format" in words) == sharded
    if sharded:
        assert after(words, "--ckpt-format") == "fsdp_dtensor"
    assert ("--use-precision-aware-optimizer" in words) == (preset == "zero-offload")


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy.context.size": 4},
        {"strategy.precision": "fp8"},
        {"strategy.precision": "mxfp8", "cluster.gpu": "b200"},
        {"strategy.tensor.size": 4, "strategy.tensor.sequence": True},
    ],
)
def test_megatrons_own_layers_are_not_asked_for_what_they_cannot(fields: dict[str, Any]) -> None:
    words, found = arguments("ddp", **{"strategy.kernels": "eager", **fields})
    assert after(words, "--transformer-impl") == "transformer_engine"
    assert "split no context" in lost(found)["strategy.kernels"]
    plain, none = arguments("ddp", **{"strategy.kernels": "eager"})
    assert after(plain, "--transformer-impl") == "local"
    assert "--no-persist-layer-norm" in plain and "strategy.kernels" not in lost(none)


def test_megatron_has_text_and_tokenizer_and_says_which() -> None:
    words, found = arguments("ddp")
    assert "--mock-data" in words and after(words, "--tokenizer-type") == "NullTokenizer"
    assert "--data-path" in lost(found)["corpus.source"]


def test_megatron_has_one_queue_where_it_asks_for_it() -> None:
    first = {name: arguments(name)[0][0] for name in ("megatron-tp", "ring-attention", "fsdp")}
    assert first["megatron-tp"] == first["ring-attention"] == "CUDA_DEVICE_MAX_CONNECTIONS=1"
    sharded = {"strategy.tensor.size": 8, "strategy.data.zero": 2}
    assert first["fsdp"] == arguments("fsdp", **sharded)[0][0] == "torchrun"


def test_megatron_splits_a_sequence_in_two_parts_a_rank() -> None:
    with pytest.raises(PlanError, match="legal: a multiple of 16") as refused:
        arguments("ulysses", **{"strategy.context.size": 8, "training.sequence_length": 24})
    assert refused.value.problems[0].field == "training.sequence_length"


def test_asynchronous_saves_of_megatron_have_a_worker() -> None:
    fields = {"checkpoint.every": 10, "checkpoint.asynchronous": True}
    words, found = arguments("ddp", **fields)
    assert {"--async-save", "--use-persistent-ckpt-worker"} <= set(words)
    assert "checkpoint.asynchronous" not in lost(found)


def test_deepspeed_has_no_key_that_it_removed() -> None:
    plan = Plan.of("llama-3-8b", gpu=H100, gpus=16, strategy="hybrid-shard")
    found = interop.write(plan, "deepspeed")
    assert "mics" not in found.text
    assert "removed" in lost(found)["strategy.data.shard"]
