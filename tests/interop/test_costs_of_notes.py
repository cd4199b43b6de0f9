"""Settings that a plan does not set and that change memory or time by a lot: their notes say what
they change, with figures.
"""

import json
import re
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME
from workbench import interop
from workbench.interop.accelerate import fsdp_keys
from workbench.interop.deepspeed import deepspeed_keys
from workbench.interop.foreign_keys import NO_FIELD, _why
from workbench.interop.trainer import trainer_keys
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolution import model_shape
from workbench.units import gib_text

HEAD = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"


def fsdp(*lines: str, model: str = "llama-3-8b") -> dict[str, str]:
    text = HEAD + "".join(f"  fsdp_{line}\n" for line in lines)
    found = interop.read(text, model=model, gpu=GPU_NAME)
    notes = {note.field: note.why for note in (*found.untranslated, *found.assumed)}
    return {field.removeprefix("fsdp_config.fsdp_"): why for field, why in notes.items()}


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
@pytest.mark.parametrize("policy", ["NO_WRAP", "no_wrap", None])
def test_one_unit_means_that_the_whole_model_is_gathered(model: str, policy: str | None) -> None:
    size = gib_text(2 * parameters(model_shape(model)).total)
    said = [f"auto_wrap_policy: {policy}"] if policy else []
    why = fsdp("sharding_strategy: FULL_SHARD", *said, model=model)["auto_wrap_policy"]
    assert "the whole model" in why and "+ 2 bytes x " in why and size in why


def test_units_by_size_say_how_much_is_gathered() -> None:
    notes = fsdp("auto_wrap_policy: SIZE_BASED_WRAP", "min_num_params: 2147483648")
    assert "4.0 GiB" in notes["min_num_params"]


def test_layers_as_units_are_what_the_estimate_counts() -> None:
    notes = fsdp("auto_wrap_policy: TRANSFORMER_BASED_WRAP")
    assert "auto_wrap_policy" not in notes
    assert "auto_wrap_policy" not in fsdp("sharding_strategy: NO_SHARD")


def deepspeed(**zero: Any) -> dict[str, str]:
    text = json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3, **zero}})
    found = interop.read(text, model="llama-3-8b", gpu=GPU_NAME, gpus=8)
    return {note.field.rpartition(".")[2]: note.why for note in found.untranslated}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("allgather_bucket_size", 2147483648, "4.0 GiB"),
        ("stage3_max_live_parameters", 1e9, "1.9 GiB"),
        ("stage3_max_reuse_distance", 1e9, "1.9 GiB"),
        ("stage3_prefetch_bucket_size", 524288000, "1000 MiB"),
        ("stage3_param_persistence_threshold", 1e6, "2 MiB"),
        ("sub_group_size", 1e9, "1.9 GiB"),
        ("contiguous_gradients", True, "bucket"),
        ("zero_hpz_partition_size", 8, "2 bytes x parameters / 8"),
        ("stage3_max_live_parameters", "auto", "auto"),
    ],
)
def test_a_setting_of_zero_says_what_it_changes(key: str, value: Any, words: str) -> None:
    assert words in deepspeed(**{key: value})[key]


COSTLY = {
    fsdp_keys: (
        "fsdp_config.fsdp_limit_all_gathers",
        "fsdp_config.fsdp_forward_prefetch",
        "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_sync_module_states",
        "fsdp_config.fsdp_ignored_modules",
        "fsdp_config.fsdp_use_orig_params",
        "deepspeed_config.zero3_init_flag",
        "deepspeed_config.zero3_save_16bit_model",
    ),
    deepspeed_keys: tuple(
        f"zero_optimization.{key}"
        for key in (
            "allgather_bucket_size",
            "reduce_scatter",
            "contiguous_gradients",
            "stage3_max_live_parameters",
            "max_live_parameters",
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "param_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "sub_group_size",
            "offload_optimizer.pin_memory",
            "offload_param.pin_memory",
            "offload_param.max_in_cpu",
        )
    ),
}


@pytest.mark.parametrize("table", COSTLY, ids=lambda table: table.__name__.rpartition(".")[2])
def test_nothing_that_costs_is_called_a_detail(table: Any) -> None:
    assert [key for key in COSTLY[table] if "a detail" in _why(key, table.WHYS)] == []


@pytest.mark.parametrize(
    "key",
    [
        "use_unsloth_gc",
        "activation_offloading",
        "upcast_layernorm",
        "ref_model",
        "reference_model_name_or_path",
        "lora_mlp_kernel",
        "dpo_use_liger_kernel",
        "use_liger_loss",
        "group_by_length",
        "neat_packing",
        "resize_vocab",
        "auto_find_batch_size",
        "deepcompile",
        "use_scattermoe",
        "neftune_noise_alpha",
        "loraplus_lr_ratio",
        "pissa_init",
        "embedding_lr",
        "optim_args",
        "cosine_constant_lr_ratio",
    ],
)
def test_an_argument_of_a_trainer_says_what_it_changes(key: str) -> None:
    why = _why(key, trainer_keys.WHYS)
    assert key in trainer_keys.KNOWN and why != NO_FIELD
    assert re.search(r"memory|time|bytes|2 x|learns|learned|less|estimate", why)


MEGATRON = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 4 --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3"
)
NEOX = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
    **{"model_parallel_size": 4, "num_gpus": 4, "max_position_embeddings": 32, "train_iters": 1},
    **{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("each", "rows"), [(None, 1024), (64, 1024), (512, 2048), (250, 1000)])
@pytest.mark.parametrize("form", ["megatron", "gpt-neox"])
def test_rows_that_pad_the_vocabulary_are_counted(
    form: str, each: int | None, rows: int, tied: bool
) -> None:
    key = "make-vocab-size-divisible-by"
    flags = "" if tied else " --untie-embeddings-and-output-weights"
    flags += "" if each is None else f" --{key} {each}"
    own = {"no_weight_tying": not tied} | ({} if each is None else {key.replace("-", "_"): each})
    text = MEGATRON + flags if form == "megatron" else json.dumps({**NEOX, **own})
    found = interop.read(text, gpu=GPU_NAME, vocab_size=1000)
    notes = [*found.untranslated, *found.assumed]
    (why,) = (note.why for note in notes if "vocab" in note.field and "divisible" in note.field)
    assert f"{rows:,} rows, + {(rows - 1000) * 64 * (2 - tied):,} parameters" in why
