"""What is written keeps the rules that each framework checks before it starts; the frameworks
themselves are asked in `test_real_consumers.py`.
"""

import json
import shlex
import tomllib
from typing import Any

import pytest

from workbench import interop
from workbench.errors import PlanError
from workbench.interop.torchtitan.registry import tables_of
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
    with pytest.raises(PlanError, match="context = 16 parts") as refused:
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


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("master", ["none", "auto"])
def test_deepspeed_keeps_bf16_states_only_where_it_can(zero: int, master: str) -> None:
    fields = {"training.optimizer.master": master, "training.optimizer.moments": "bf16"}
    preset = Plan.of("tiny", gpu=H100, gpus=2, strategy=f"zero-{zero}", set=fields)
    found = interop.write(preset, "deepspeed")
    legal = zero >= 1 and master == "none"
    assert ("bf16_optimizer_states" in found.text) == legal
    assert ("training.optimizer.moments" in lost(found)) == (not legal)


VERSIONS = interop.VERSIONS["torchtitan"]


def job(
    version: str, preset: str, model: str = "llama-3-8b", gpus: int = 16, **fields: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """(dotted keys of a job of torchtitan, why its fields are lost)."""
    plan = Plan.of(model, gpu=H100, gpus=gpus, strategy=preset, set=fields)
    found = interop.write(plan, "torchtitan", version)
    if version == "0.3.0":
        return tables_of(found.text, None, None), lost(found)
    return tomllib.loads(found.text), lost(found)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_has_the_names_that_its_torchtitan_has(version: str) -> None:
    fields = {
        "training.seed": 3,
        "training.deterministic": True,
        "strategy.kernels": "compiled",
        "checkpoint.every": 5,
        "training.evaluation.every": 5,
        "strategy.gradient_dtype": "bf16",
    }
    rows, why = job(version, "fsdp", **fields)
    old, oldest = version in ("0.1.0", "0.2.0"), version == "0.1.0"
    assert rows["training" if old else "debug"]["seed"] == 3
    assert rows["training" if old else "debug"]["deterministic"] is True
    assert ("debug" in rows) == (not old)
    assert ("compile" in rows["training"]) == oldest and ("compile" in rows) == (not oldest)
    assert ("enable_checkpoint" if oldest else "enable") in rows["checkpoint"]
    assert ("lr_min" if oldest else "min_lr_factor") in rows["lr_scheduler"]
    assert ("validation" in rows) == (not oldest)
    assert ("training.evaluation.every" in why) == oldest
    assert "mixed_precision_reduce" not in rows["training"]
    assert "float32" in why["strategy.gradient_dtype"]


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_torchtitans_experts_are_over_ranks_that_shard(version: str) -> None:
    rows, why = job(version, "expert-parallel", "mixtral-8x7b", 64)
    p = rows["parallelism"]
    degrees = [p[f"data_parallel_{name}_degree"] for name in ("replicate", "shard")]
    assert degrees == [8, 8] and p["expert_parallel_degree"] == 8
    assert "strategy.data.zero" in why and "debugmodel" in why["model"]


@pytest.mark.parametrize("version", VERSIONS)
def test_replicas_beside_another_axis_shard_before_python(version: str) -> None:
    rows, why = job(version, "megatron-3d")
    p = rows["parallelism"]
    sharded = version != "0.3.0"
    assert (p["data_parallel_shard_degree"] > 1) == sharded == ("strategy.data.zero" in why)
    assert job(version, "ddp")[0]["parallelism"]["data_parallel_replicate_degree"] == 16


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.2-1b", "deepseek-v2-lite", "gpt2-xl"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_that_a_torchtitan_lacks_is_said(version: str, model: str) -> None:
    rows, why = job(version, "fsdp", model, **{"training.sequence_length": 512})
    has = {"llama-3.2-1b": ("0.3.0",), "deepseek-v2-lite": VERSIONS[1:]}.get(model, ())
    assert ("model" in why) == (version not in has)
    flavor = rows.get("model", {}).get("flavor")
    assert flavor == ({"llama-3.2-1b": "1B"}.get(model, "16B") if version in has else flavor)
    assert version in has or flavor in (None, "debugmodel")


def test_versions_are_of_torchtitan_and_said() -> None:
    plan = Plan.of("tiny", gpu=H100)
    with pytest.raises(PlanError, match=r"is '0\.4\.0'; legal: 0\.1\.0, .*, 0\.3\.0"):
        interop.write(plan, "torchtitan", "0.4.0")
    with pytest.raises(PlanError, match="legal: none"):
        interop.write(plan, "deepspeed", "0.3.0")
    newest = interop.write(plan, "torchtitan").text
    assert newest == interop.write(plan, "torchtitan", VERSIONS[-1]).text
    assert interop.detect(newest) == "torchtitan"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_pipeline_of_deepspeeds_shards_the_optimizer_only(zero: int) -> None:
    fields: dict[str, Any] = {"strategy.pipeline.size": 2, "strategy.data.zero": zero}
    fields |= {"strategy.data.offload": "parameters"} if zero == 3 else {}
    plan = Plan.of("llama-3-8b", gpu=H100, gpus=16, strategy="zero-1", set=fields)
    found = interop.write(plan, "deepspeed")
    written = json.loads(found.text)["zero_optimization"]
    assert written["stage"] == 1 and "offload_param" not in written
    assert ("strategy.data.zero" in lost(found)) == (zero > 1)
    assert ("strategy.data.offload" in lost(found)) == (zero == 3)
