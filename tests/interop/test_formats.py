"""Foreign configurations read: what they mean, what is left out and why, and what is refused by
name."""

import json
from pathlib import Path

import pytest

from tests.interop.foreign_samples import (
    DS,
    FSDP,
    GPU_NAME,
    NEOX,
    ON_8,
    ON_16,
    RECIPE,
    TITAN,
    TRAINERS,
    assumed,
    load,
    problems,
)
from workbench import interop
from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.errors import PlanError
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.gpt_neox import read_gpt_neox


@pytest.mark.parametrize(
    "name", ["ds_config.json", "accelerate.yaml", "megatron.sh", "torchtitan.toml"]
)
def test_the_stack_is_one_that_the_planner_knows(name: str) -> None:
    more = {} if name in ("megatron.sh", "torchtitan.toml") else {"model": "tiny"}
    assert load(name, **more).plan.strategy.stack in framework_table()
    assert (
        read_deepspeed.read({"pipeline": {"stages": 2}}, ON_16).plan.strategy.stack
        in framework_table()
    )


def test_what_is_set_decides_where_the_file_says_auto() -> None:
    sets = {
        "strategy.precision": "fp16",
        "training.optimizer.learning_rate": 2e-5,
        "training.micro_batch": 4,
    }
    found = interop.read(json.dumps(TRAINERS), model="llama-3-8b", gpu=GPU_NAME, gpus=16, set=sets)
    full = found.plan.resolve()
    assert (full.strategy.precision, full.strategy.gradient_dtype) == ("fp16", "fp16")
    assert (full.training.optimizer.learning_rate, full.training.micro_batch) == (2e-5, 4)
    assert not set(sets) & set(assumed(found))


def test_precision_that_no_key_says_is_assumed() -> None:
    assert (
        assumed(read_deepspeed.read({"train_batch_size": 16}, ON_16))["strategy.precision"]
        == "fp32"
    )
    off = {"train_batch_size": 16, "bf16": {"enabled": False}}
    assert "strategy.precision" not in assumed(read_deepspeed.read(off, ON_16))
    assert assumed(read_gpt_neox.read(NEOX, ON_8))["strategy.precision"] == "fp32"


@pytest.mark.parametrize(
    "old, new, field, words",
    [
        ("TEST_TYPE: regular", "MODE: inference", "MODE", "legal: pretraining"),
        ("parallel-size: 2", "parallel-size: ${TP}", "--tensor-model-parallel-size", "${TP}"),
        ("--bf16: true", "--no-such-thing: true", "--no-such-thing", "unknown key"),
        ("<<: *BASE", "<<: 3", "<<", "an anchor"),
    ],
)
def test_recipes_refused_by_name(old: str, new: str, field: str, words: str) -> None:
    assert (
        words
        in problems(interop.read, RECIPE.replace(old, new), gpu=GPU_NAME, vocab_size=512)[field]
    )


@pytest.mark.parametrize(
    "text, field, words",
    [
        (DS[:-1], "file", "not valid JSON at line 1"),
        (DS.replace("{", '{"bf16": {}, "bf16": {}, ', 1), "bf16", "written twice"),
        (DS.replace('"stage": 1', '"stage": 1, "stage": 2'), "stage", "written twice"),
        (
            DS.replace('"stage": 1', '"stage": 5'),
            "zero_optimization.stage",
            "at least 0 and at most 3",
        ),
        (
            DS.replace('"stage": 1', '"stag": 1'),
            "zero_optimization.stag",
            "did you mean zero_optimization.stage",
        ),
        (DS.replace("16", '"many"'), "train_batch_size", "is 'many'; must be an integer"),
        (DS.replace("16", "NaN"), "", "NaN is no number"),
        (
            DS.replace("}}", '}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}'),
            "fp16.enabled",
            "one of them",
        ),
        (DS.replace("}}", '}, "optimizer": {"type": "Sgdd"}}'), "optimizer.type", "legal: Adam"),
        ("[model\n[parallelism]\n[training]", "file", "not valid TOML"),
        (
            TITAN + "tensor_parallel_degree = 4\n",
            "parallelism.tensor_parallel_degree",
            "written twice (lines 4 and 5)",
        ),
        (TITAN + "data_parallel_shard_degree = 3\n", "gpus", "the file says 6"),
        (
            TITAN + "pipeline_parallel_schedule = '2F2B'\n",
            "parallelism.pipeline_parallel_schedule",
            "1F1B, GPipe",
        ),
        (
            TITAN + "data_parallel_shard_degree = 0\n",
            "parallelism.data_parallel_shard_degree",
            "legal: -1",
        ),
        (TITAN + "degree = 3\n", "parallelism.degree", "unknown key"),
        (
            TITAN.replace("= 2", "= 'two'"),
            "parallelism.tensor_parallel_degree",
            "must be an integer",
        ),
        (FSDP + "num_processes: 8\n", "num_processes", "lines 2 and 3"),
        (FSDP.replace("16", "12"), "gpus", "the file says 12"),
        (FSDP.replace("FSDP", "XLA"), "distributed_type", "legal here: FSDP, DEEPSPEED"),
        (FSDP.replace("FSDP", "MEGATRON_LM"), "distributed_type", "arguments"),
        (
            FSDP.replace("FSDP", "DEEPSPEED") + "deepspeed_config: {zero_stage: 4}\n",
            "deepspeed_config.zero_stage",
            "is 4",
        ),
        (
            FSDP.replace("FSDP", "DEEPSPEED") + "deepspeed_config: {zero_stag: 3}\n",
            "deepspeed_config.zero_stag",
            "did you mean deepspeed_config.zero_stage",
        ),
        (
            FSDP.replace("FSDP", "DEEPSPEED")
            + "deepspeed_config: {deepspeed_config_file: ../x.json}\n",
            "deepspeed_config.deepspeed_config_file",
            "'../x.json', which is no file that can be read beside",
        ),
        (FSDP + "mixed_precision: bf16\nfp16: true\n", "fp16", "mixed_precision is bf16"),
        (
            FSDP
            + "fsdp_config: {fsdp_backward_prefetch: NO_PREFETCH, fsdp_backward_prefetch_policy: "
            "BACKWARD_PRE}\n",
            "fsdp_config.fsdp_backward_prefetch_policy",
            "older name",
        ),
        (FSDP + "fsdp_config: [1]\n", "fsdp_config", "is [1]; must be a mapping"),
        ('{"zero_optimization": 3}', "zero_optimization", "is 3; must be a mapping"),
        ("training = 3\n" + TITAN, "training", "is 3; must be a mapping"),
        (
            FSDP + "fsdp_config: {fsdp_sharding_strategy: HALF}\n",
            "fsdp_config.fsdp_sharding_strategy",
            "FULL_SHARD, SHARD",
        ),
        (FSDP + "mixed_precision: fp12\n", "mixed_precision", "legal: no, fp16, bf16"),
        (
            "--num-layers 4\n--num-layers 5 --hidden-size 8 --num-attention-heads 2",
            "--num-layers",
            "is 4 (line 1) and 5 (line 2), written twice",
        ),
        ("--num-layers 4 --hiden-size 4", "--hidden-size", "missing"),
        ("--num-layers '4", "file", "line 1 cannot be read"),
        ("hello", "file", "no format that is known here"),
        ("", "file", "DeepSpeed ds_config.json (train_batch_size"),
    ],
)
def test_refused_by_name(text: str, field: str, words: str) -> None:
    given = {"gpu": GPU_NAME, "gpus": 16} | (
        {} if "flavor" in text or "--num" in text else {"model": "tiny"}
    )
    found = problems(interop.read, text, **given)
    assert words in found[field], found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert (
        "cannot be read" in problems(interop.load, tmp_path / "no.json")[str(tmp_path / "no.json")]
    )
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems(interop.load, tmp_path / "bin")[str(tmp_path / "bin")]


def test_a_model_alone_is_pointed_to_the_option_that_takes_it() -> None:
    with pytest.raises(PlanError, match=r"config\.json.*--model"):
        interop.read(
            '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}'
        )
