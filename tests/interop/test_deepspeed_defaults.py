"""What a ds_config.json leaves out: DeepSpeed's own defaults are taken, and told."""

from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, NEOX
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.accelerate import read_accelerate
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.translation import Imported, ImportOptions
from workbench.safe_io import yaml_files

ON_16 = ImportOptions("llama-3-8b", "h100-sxm-80gb", 16, sets={"training.steps": 5000})
ADAM = {"type": "AdamW", "params": {"lr": 3e-4}}


def read(**config: Any) -> Imported:
    return read_deepspeed.read({"train_batch_size": 16, **config}, ON_16)


def assumed(found: Imported) -> dict[str, Any]:
    return {note.field.rpartition(".")[2]: note.value for note in found.assumed}


def left(found: Imported) -> dict[str, Any]:
    return {note.field: note.why for note in found.untranslated}


def test_missing_betas_are_the_optimizers_own() -> None:
    found = read(optimizer=ADAM)
    optimizer = found.plan.training.optimizer
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.999)
    assert (assumed(found)["beta1"], assumed(found)["beta2"]) == (0.9, 0.999)
    assert read(optimizer={"type": "SGD", "params": {"lr": 0.1}}).plan.training.optimizer.beta1 == 0
    said = read(optimizer={"type": "Adam", "params": {"betas": [0.8, 0.9]}})
    assert said.plan.training.optimizer.beta2 == 0.9 and "beta2" not in assumed(said)


def test_the_schedule_says_the_peak() -> None:
    params = {"warmup_max_lr": 1e-4, "warmup_num_steps": 10, "warmup_type": "linear"}
    found = read(optimizer=ADAM, scheduler={"type": "WarmupLR", "params": params})
    assert found.plan.training.optimizer.learning_rate == 1e-4
    assert "warmup_max_lr" in left(found)["optimizer.params.lr"]
    assert "scheduler.params.warmup_max_lr" in found.translated
    bare = read(
        optimizer=ADAM, scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}
    )
    assert bare.plan.training.optimizer.learning_rate == assumed(bare)["learning_rate"] == 1e-3
    cosine = read(
        optimizer=ADAM, scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}
    )
    assert (
        cosine.plan.training.optimizer.learning_rate == 3e-4
    )  # a share of the optimizer's own rate


def test_a_constant_schedule_rises_to_the_optimizers_own_rate() -> None:
    found = read(optimizer=ADAM, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    assert found.plan.training.optimizer.learning_rate == 3e-4
    (note,) = (note for note in found.assumed if note.field == "training.optimizer.learning_rate")
    assert (
        note.value == 3e-4
        and "warmup_max_lr" in note.why
        and "optimizer.params.lr" in found.translated
    )
    neither = read(
        optimizer={"type": "AdamW"},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    )
    assert (
        neither.plan.training.optimizer.learning_rate == assumed(neither)["learning_rate"] == 1e-3
    )


def test_a_cosine_that_names_no_end_falls_to_deepspeeds_own() -> None:
    found = read(
        optimizer=ADAM, scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}
    )
    assert found.plan.training.optimizer.final_ratio == assumed(found)["final_ratio"] == 1e-4
    said = read(
        optimizer=ADAM, scheduler={"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0}}
    )
    assert said.plan.training.optimizer.final_ratio == 0 and "final_ratio" not in assumed(said)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_of_unsaid_length_takes_1000_steps(kind: str) -> None:
    found = read(optimizer=ADAM, scheduler={"type": kind, "params": {}})
    assert found.plan.training.optimizer.warmup_steps == assumed(found)["warmup_steps"] == 1000


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_logarithmic_warm_up_is_told_said_or_not(kind: str) -> None:
    unsaid = read(scheduler={"type": kind, "params": {"warmup_num_steps": 10}})
    assert "logarithmically" in left(unsaid)["scheduler.type"]
    linear = read(
        scheduler={"type": kind, "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    )
    assert (
        "scheduler.type" not in left(linear) and "scheduler.params.warmup_type" in linear.translated
    )
    logarithmic = read(
        scheduler={"type": kind, "params": {"warmup_num_steps": 10, "warmup_type": "log"}}
    )
    assert "linearly" in left(logarithmic)["scheduler.params.warmup_type"]


def test_fp16_that_alone_is_left_to_the_trainer_is_taken() -> None:
    found = read(fp16={"enabled": "auto"})
    assert found.plan.strategy.precision == assumed(found)["precision"] == "fp16"
    assert "fp16 was taken" in left(found)["fp16.enabled"]
    both = read(fp16={"enabled": "auto"}, bf16={"enabled": "auto"})
    assert both.plan.resolve().strategy.precision == "bf16"


def test_a_warm_up_without_a_length_asks_for_the_length() -> None:
    config = {
        "train_batch_size": 16,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
    }
    with pytest.raises(PlanError) as caught:
        read_deepspeed.read(config, ImportOptions("llama-3-8b", "h100-sxm-80gb", 16))
    (problem,) = caught.value.problems
    assert problem.field == "training.steps"
    assert "1000" in problem.message and "--set training.steps=" in problem.message
    assert "100 " not in problem.message  # the file says no such number


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_master_weights_in_16_bits_are_none_beside_the_parameters(name: str) -> None:
    found = read(**{name: {"enabled": True, f"{name}_master_weights_and_grads": True}})
    assert found.plan.training.optimizer.master == "none"
    assert f"{name}.{name}_master_weights_and_grads" in found.translated
    assert read(**{name: {"enabled": True}}).plan.training.optimizer.master == "auto"


def test_what_the_rest_of_the_file_says_is_not_called_the_plans_default() -> None:
    found = read_deepspeed.read(
        {"train_batch_size": "auto", "gradient_accumulation_steps": 32, "optimizer": ADAM}, ON_16
    )
    assert found.plan.training.global_batch == 32 * 16
    why = left(found)["train_batch_size"]
    assert "default" not in why and "the rest of the file says training.global_batch" in why
    alone = read_deepspeed.read({"train_batch_size": "auto", "optimizer": ADAM}, ON_16)
    assert "the plan's default of training.global_batch stands" in left(alone)["train_batch_size"]


def test_accelerate_leaves_the_bucket_to_deepspeed() -> None:
    config = {"distributed_type": "DEEPSPEED", "num_processes": 16, "mixed_precision": "bf16"}
    found = read_accelerate.read({**config, "deepspeed_config": {"zero_stage": 3}}, ON_16)
    assert found.plan.strategy.data.bucket_mib == assumed(found)["bucket_mib"] == 5e8 * 2 / 2**20
    assert (
        "DeepSpeed's default" in {n.field: n.why for n in found.assumed}["strategy.data.bucket_mib"]
    )


@pytest.mark.parametrize(
    "name, stage, gradients", [("bf16", 0, "fp32"), ("bf16", 1, "bf16"), ("fp16", 0, "fp16")]
)
def test_bf16_gradients_add_up_in_fp32_without_zero(name: str, stage: int, gradients: str) -> None:
    found = read(**{name: {"enabled": True}, "zero_optimization": {"stage": stage}})
    assert found.plan.strategy.gradient_dtype == assumed(found)["gradient_dtype"] == gradients


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 16 --train-iters 9 "
    "--bf16 --deepspeed"
)


@pytest.mark.parametrize(
    "text",
    [
        "bf16: {enabled: true}\nzero_optimization: {stage: 0}\ntrain_batch_size: 16\n",
        yaml_files.dump({**NEOX, "bf16": {"enabled": True}, "train_batch_size": 16}),
        f"{MEGATRON} --zero-stage 0",
        MEGATRON,
    ],
)
def test_deepspeeds_optimizer_of_bf16_shards_its_states_without_zero(text: str) -> None:
    found = interop.read(text, model=None if "layers" in text else "tiny", gpu=GPU_NAME, gpus=16)
    assert found.plan.strategy.data.zero == assumed(found)["zero"] == 1
    narrow = interop.read(
        text.replace("bf16", "fp16"),
        model=None if "layers" in text else "tiny",
        gpu=GPU_NAME,
        gpus=16,
    )
    assert narrow.plan.strategy.data.zero == 0


@pytest.mark.parametrize("key", ["_comment", "comment", "//", "//batch", "__note__"])
def test_a_key_that_holds_a_comment_is_ignored(key: str) -> None:
    found = read(**{key: "of x", "zero_optimization": {"stage": 2, key: "of y"}})
    ignored = {note.field: note.why for note in found.ignored}
    assert ignored == {key: "a comment", f"zero_optimization.{key}": "a comment"}


@pytest.mark.parametrize("older", ["cpu_offload_param", "cpu_offload_params"])
def test_the_older_switch_of_offloaded_parameters_is_read(older: str) -> None:
    found = read(zero_optimization={"stage": 3, "cpu_offload": True, older: True})
    assert found.plan.resolve().strategy.data.offload == "parameters"
