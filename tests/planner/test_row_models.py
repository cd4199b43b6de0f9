"""Rows that leave something out: models by their names, and what other fields imply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.test_measured_rows import UNNAMED, cells, reason, said
from workbench.plan.catalog import catalog
from workbench.planner.validation.implied_fields.published_models import (
    find_published_model,
    tokenizer_vocab,
)
from workbench.planner.validation.implied_fields.stage_layers import layers_of_stages, recipe_layout
from workbench.planner.validation.measured_rows import parse_row
from workbench.planner.validation.row_shapes import implied_layers, is_shape_inferred, row_shape
from workbench.planner.validation.row_to_plan import is_complete, is_complete_moe

SHAPE_COLUMNS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "params_b")
NAMED_ALONE = dict.fromkeys((*SHAPE_COLUMNS, "arch", "tied_emb", "gated_ffn"), "")
"""Of a row, nothing of the model but its name."""
BRIDGE = {"framework": "Megatron-Bridge/mcore", "zero_stage": "1", "recompute": "none"}
DEEPSEEK: dict[str, Any] = {
    **NAMED_ALONE,
    **BRIDGE,
    "model": "DeepSeekV3",
    "arch": "MLA+MoE",
    "seq": "4096",
    "n_gpus": "128",
    "pp": "16",
    "dp": "8",
    "ep": "8",
    "gbs": "256",
    "schedule": "1f1b",
}


@pytest.mark.parametrize(
    ("said_as", "name"),
    [
        ("DeepSeek V3 671B", "deepseek-v3"),
        ("DeepSeekV3 (tokendrop)", "deepseek-v3"),
        ("Kimi_K2", "kimi-k2"),
        ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
        ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
        ("GPT-OSS 20B", "gpt-oss-20b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("Llama-3-70B SFT", "llama-3-70b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("DeepSeek-V3 16B", None),
        ("DeepSeekV4 Flash", None),
        ("Llama 3", None),
        ("Llama-like-8B", None),
        ("GPT-2 18B", None),
        ("small", None),
    ],
)
def test_published_models_by_the_names_of_rows(said_as: str, name: str | None) -> None:
    assert find_published_model(said_as) == name


def test_a_named_model_has_its_published_shape() -> None:
    shape = said(**NAMED_ALONE, model="Qwen3 MoE 30B", framework="FSDP2").plan.shape
    published = catalog.models()["qwen3-30b-a3b"].shape
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "tied", "mlp"):
        assert getattr(shape, field) == getattr(published, field), field
    assert shape.moe and published.moe and shape.moe.experts == published.moe.experts
    assert not is_shape_inferred(parse_row(cells(**NAMED_ALONE, model="Qwen3 MoE 30B")))


def test_a_row_that_states_another_width_is_of_another_model() -> None:
    assert reason(layers="", hidden="5120", params_b="") == "missing layers"
    assert reason(layers="", gated_ffn="no", params_b="") == "missing layers"


def test_latent_attention_of_a_published_model_or_in_words() -> None:
    published = catalog.models()["deepseek-v3"].shape.mla
    assert said(**DEEPSEEK).plan.shape.mla == published
    widths = "kv_lora_rank 256, qk_rope_head_dim 32, qk_nope_head_dim 64, v_head_dim 64"
    mla = said(arch=f"llama MLA ({widths})", **UNNAMED).plan.shape.mla
    assert mla and (mla.kv_rank, mla.q_rank, mla.rope_dim, mla.nope_dim) == (256, None, 32, 64)
    words = "MLA: --kv-lora-rank 256 --q-lora-rank 512 --qk-pos-emb-head-dim 32 --qk-head-dim 64"
    mla = said(arch=f"llama {words} --v-head-dim 64", **UNNAMED).plan.shape.mla
    assert mla and (mla.q_rank, mla.rope_dim, mla.nope_dim, mla.value_dim) == (512, 32, 64, 64)


def test_experts_in_words() -> None:
    moe = said(
        arch="llama MoE (moe_ffn_hidden_size 1408, 2 shared)", n_experts="64", topk="6", **UNNAMED
    ).plan.shape.moe
    assert moe and (moe.ffn, moe.shared, moe.first_dense) == (1408, 2, 0)


def test_windows_in_words_and_of_every_second_layer() -> None:
    assert said(arch="mistral sliding window 4096", **UNNAMED).plan.shape.window == 4096
    assert said(arch="llama, no sliding window", **UNNAMED).plan.shape.window is None
    shape = said(**NAMED_ALONE, model="GPT OSS 120B", framework="FSDP2").plan.shape
    assert (shape.window, shape.full_attention_every) == (128, 2)
    # A note may speak of another system.
    assert said(notes="unlike the sliding window of Mistral").plan.shape.window is None


def test_a_layer_that_predicts_a_further_token_counts_as_one() -> None:
    unstated = {**DEEPSEEK, "arch": "MLA+MoE (MTP unless stated)"}
    assert said(**unstated).plan.shape.layers == 62
    assert said(**{**unstated, "model": "DeepSeekV3 (w/o MTP)"}).plan.shape.layers == 61
    assert said(**DEEPSEEK).plan.shape.layers == 61
    assert is_shape_inferred(parse_row(cells(**unstated)))
    assert not is_shape_inferred(parse_row(cells(**{**unstated, "model": "DeepSeekV3 (w/ MTP)"})))


def test_layers_follow_from_the_printed_parameters() -> None:
    row = parse_row(cells(layers="", **{**UNNAMED, "params_b": "8.03"}))
    assert implied_layers(row) == 32
    assert is_shape_inferred(row)
    # Nine tenths of a layer more: no whole number makes it up.
    assert implied_layers(parse_row(cells(layers="", **{**UNNAMED, "params_b": "8.13"}))) is None
    assert not is_shape_inferred(parse_row(cells()))


def test_vocabularies_by_their_tokenizers() -> None:
    assert tokenizer_vocab("text, GPT2 tokenizer") == 50257
    assert tokenizer_vocab("tokenizer: Llama-3, packed") == 128256
    assert tokenizer_vocab("its own tokenizer") is None
    changes = {"vocab": "", "notes": "gpt-neox tokenizer", **UNNAMED}
    assert said(**changes).plan.shape.vocab == 50432


def test_embedding_and_head_count_where_stages_do_not_divide_the_layers() -> None:
    llama = catalog.models()["llama-3.1-405b"].shape
    for stages, first, middle in ((128, 0, 1), (64, 1, 2), (32, 3, 4)):
        found = layers_of_stages("even-with-ends", llama, stages)
        assert found == [first, *[middle] * (stages - 2), first]
    divided = layers_of_stages("even-with-ends", llama.model_copy(update={"layers": 128}), 32)
    assert divided == [4] * 32
    assert layers_of_stages("even", llama, 4) == [32, 32, 31, 31]
    assert layers_of_stages("balanced", llama, 4) is None


def test_a_named_model_has_its_published_biases() -> None:
    """OpenAI's config.json: attention_bias, and biases of experts and router."""
    named = {**NAMED_ALONE, **BRIDGE, "model": "GPT OSS 120B", "arch": "MoE GQA sliding window"}
    row = parse_row(cells(**{**named, "seq": "4096", "n_gpus": "64", "ep": "64", "gbs": "64"}))
    assert row_shape(row).biases == "all"
    assert row_shape(parse_row(cells(**DEEPSEEK))).biases == "none"


def test_recipes_lay_out_what_no_stages_divide() -> None:
    assert recipe_layout("deepseek-v3", 16) == (*[4] * 15, 1)
    assert recipe_layout("deepseek-v3", 5) is None
    assert said(**DEEPSEEK).plan.strategy.pipeline.partition == [4] * 15 + [1]
    further = {**DEEPSEEK, "arch": "MLA+MoE, MTP"}
    assert said(**further).plan.strategy.pipeline.partition == [4] * 15 + [2]


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
@pytest.mark.parametrize("stages", [4, 8, 16, 32])
def test_recipes_hold_every_layer(model: str, stages: int) -> None:
    layout = recipe_layout(model, stages)
    assert layout and sum(layout) == catalog.models()[model].shape.layers


def test_a_batch_follows_from_rate_and_time() -> None:
    open_batch = {"gbs": "", "mbs": "2"}
    printed = said(**open_batch, samples_per_s="42.7", iter_time_s="1.5")
    assert printed.plan.training.global_batch == 64
    assert printed.seconds == 1.5
    no_whole_number = said(**open_batch, samples_per_s="41.0", iter_time_s="1.06")
    assert no_whole_number.seconds is None


def test_a_batch_of_each_rank_in_words() -> None:
    assert said(gbs="", mbs="1", notes="local batch 4").plan.training.global_batch == 32
    assert said(gbs="", mbs="1", notes="batch size per DP printed 4").plan.num_microbatches == 4


def test_torchtitan_of_2024_made_as_many_microbatches_as_pipeline_ranks() -> None:
    changes = {"pp": "4", "dp": "2", "gbs": "64", "mbs": "", "schedule": "1F1B"}
    early = said(**changes, table="llama3_h100_202412")
    assert early.plan.strategy.stack == "torchtitan-2024"
    assert (early.plan.training.micro_batch, early.plan.num_microbatches) == (8, 4)
    assert reason(**changes, table="llama3_h100_202512") == "missing mbs"


def test_experts_that_lie_over_tensor_ranks_are_whole_where_the_framework_says_so() -> None:
    over_tensor = {**DEEPSEEK, "tp": "2", "dp": "4", "gbs": "64"}
    whole = said(**over_tensor).plan.strategy.expert
    assert (whole.size, whole.tensor) == (8, 1)
    other = reason(**over_tensor | {"framework": "Megatron-core"})
    assert other == "experts spread over tensor ranks too"
    assert reason(**{**DEEPSEEK, "ep": "64"}) == "layout contradicts the number of GPUs"


def test_more_stages_than_layers() -> None:
    layout = {"pp": "64", "dp": "1", "n_gpus": "64", "gbs": "64"}
    assert reason(**layout, framework="nanotron") == "more pipeline stages than layers"


def test_rows_of_known_model_and_batch() -> None:
    mixture = parse_row(cells(**DEEPSEEK))
    assert is_complete_moe(mixture) and not is_complete(mixture)
    assert is_complete(parse_row(cells(mbs="", gbs="64", grad_accum="4")))
    assert not is_complete_moe(parse_row(cells(**{**DEEPSEEK, "model": "another"})))
    assert not is_complete_moe(parse_row(cells()))
