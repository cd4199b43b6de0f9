"""gpt-neox files: its own defaults, true reasons, and what is cut to fit is told."""

from typing import Any

import pytest

from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.translation import Imported, ImportOptions

ON_8 = ImportOptions(None, "h100-sxm-80gb", 8)
SMALL = {
    "pipe_parallel_size": 0,
    "model_parallel_size": 1,
    "num_layers": 4,
    "hidden_size": 64,
    "seq_length": 64,
    "num_attention_heads": 4,
    "padded_vocab_size": 512,
    "train_micro_batch_size_per_gpu": 1,
}


def read(**more: Any) -> Imported:
    return read_gpt_neox.read({**SMALL, **more}, ON_8)


def left(found: Imported) -> dict[str, Any]:
    return {note.field: note.why for note in found.untranslated}


def assumed(found: Imported) -> dict[str, Any]:
    return {note.field.rpartition(".")[2]: note.value for note in found.assumed}


def test_a_warm_up_longer_than_the_run_is_cut_and_told() -> None:
    found = read(train_iters=100, lr_decay_iters=1000, warmup=0.2)
    assert found.plan.training.optimizer.warmup_steps == 100
    assert "100 were taken, of 200" in left(found)["warmup"]
    assert read(train_iters=100, warmup=0.2).plan.training.optimizer.warmup_steps == 20


def test_a_share_to_warm_up_counts_where_the_length_is_the_plans_default() -> None:
    assert read(warmup=0.2).plan.training.optimizer.warmup_steps == 20
    unsaid = read(train_iters=500)
    assert unsaid.plan.training.optimizer.warmup_steps == assumed(unsaid)["warmup_steps"] == 5


def test_the_optimizer_that_the_file_does_not_say_is_gpt_neoxs() -> None:
    found = read(min_lr=1e-4)
    optimizer = found.plan.training.optimizer
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.epsilon) == (1e-3, 0.999, 1e-8)
    assert optimizer.final_ratio == pytest.approx(0.1) and assumed(found)["learning_rate"] == 1e-3
    bare = read(optimizer={"type": "Adam", "params": {}})
    assert bare.plan.training.optimizer.learning_rate == assumed(bare)["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("partition_activations", True, "whole on every tensor-parallel rank"),
        ("checkpoint_in_cpu", True, "strategy.offload_activations"),
        ("synchronize_each_layer", True, "waits for no GPU"),
        ("gas", 4, "gradient_accumulation_steps"),
        ("clip_grad", 0.5, "gradient_clipping"),
        ("batch_size", 4, "train_micro_batch_size_per_gpu"),
        ("load", "/old", "checkpoint.load"),
        ("loss_scale", 128, "its own rule"),
        ("use_mup", True, "muP"),
    ],
)
def test_reasons_are_true(key: str, value: Any, words: str) -> None:
    found = read(**{key: value})
    assert words in left(found)[key]
    assert "how a run is kept" not in left(found)[key]


def test_sixteen_bits_that_are_left_open_are_taken() -> None:
    found = read(fp16={"enabled": "auto"})
    assert found.plan.strategy.precision == assumed(found)["precision"] == "fp16"
    assert "fp16 was taken" in left(found)["fp16.enabled"]
    assert read(fp16={"enabled": "auto"}, bf16={"enabled": True}).plan.strategy.precision == "bf16"


def test_branches_side_by_side_and_a_part_of_a_head_that_is_rotated() -> None:
    found = read(gpt_j_residual=True, rotary_pct=0.25, pos_emb="rotary")
    shape = found.plan.resolve().shape
    assert (shape.parallel_residual, shape.rotary_dim, shape.unmodelled) == ("two_norms", 4, None)
    one = read(gpt_j_residual=True, gpt_j_tied=True, pos_emb="rotary", rotary_pct=1.0)
    assert one.plan.resolve().shape.parallel_residual == "one_norm"
    assert one.plan.resolve().shape.rotary_dim is None
    assert not {"gpt_j_residual", "gpt_j_tied", "rotary_pct"} & {*left(found), *left(one)}


def test_layers_that_share_weights_are_unmodelled() -> None:
    assert read(num_unique_layers=4).plan.resolve().shape.unmodelled is None
    found = read(num_unique_layers=2)
    assert "num_unique_layers 2" in str(found.plan.resolve().shape.unmodelled)
    assert "num_unique_layers" in left(found)


def test_dropout_seed_and_evaluation_are_gpt_neoxs_own_unless_the_file_says_them() -> None:
    silent = read()
    training = silent.plan.training
    assert (training.dropout, training.seed, training.optimizer.weight_decay) == (0, 1234, 0.1)
    assert (training.evaluation.every, training.evaluation.batches) == (1000, 100)
    (note,) = (note for note in silent.assumed if note.field == "training.dropout")
    assert "before, it was 0.1" in note.why
    assert {"dropout", "attention_dropout", "seed", "every", "batches"} <= set(assumed(silent))
    said = read(hidden_dropout=0.2, attention_dropout=0, seed=7, eval_interval=50, eval_iters=0)
    assert (
        said.plan.training.dropout,
        said.plan.training.seed,
        said.plan.training.evaluation.every,
    ) == (0.2, 7, 0)
    assert not {"dropout", "attention_dropout", "seed", "every"} & set(assumed(said))


def test_experts_beside_a_model_that_is_given_are_the_models_and_spread_as_the_file_says() -> None:
    on = ImportOptions("mixtral-8x7b", "h100-sxm-80gb", 8)
    found = read_gpt_neox.read(
        {**SMALL, "moe_num_experts": 8, "moe_top_k": 2, "moe_expert_parallel_size": 4}, on
    )
    assert found.plan.strategy.expert.size == 4 and "moe_expert_parallel_size" in found.translated
    assert (
        left(found)["moe_num_experts"]
        == left(found)["moe_top_k"]
        == ("the model given says the shape")
    )


def test_why_fp8_is_not_taken_names_the_field() -> None:
    assert "strategy.precision" in left(read(te_fp8_format="hybrid"))["te_fp8_format"]


def test_extra_arguments_of_deepspeed_stand_over_the_files_own() -> None:
    extra = {"zero_optimization": {"stage": 2}, "comms_logger": {"enabled": True}}
    found = read(zero_optimization={"stage": 1}, deepspeed_extra_args=extra)
    assert found.plan.resolve().strategy.data.zero == 2
    assert "comms_logger.enabled" in left(found)


@pytest.mark.parametrize("key", ["te_fp8_wgrad", "te_fp8_amax_history_len", "te_fp8_mha"])
def test_details_of_transformer_engines_fp8_are_known(key: str) -> None:
    assert "which is not set by it" in left(read(**{key: 1}))[key]
