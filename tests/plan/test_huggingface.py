"""Hugging Face configurations: every key used, told or unknown; wrong types refused by name,
whatever stands there.
"""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from tests.mutation import mutate
from tests.plan.test_catalog import DEEPSEEK, GPT2, LLAMA
from workbench.errors import PlanError
from workbench.plan.catalog import huggingface_config
from workbench.plan.catalog.families.table import family_of
from workbench.plan.catalog.huggingface_keys import IDLE
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan

BLOOM = {
    "model_type": "bloom",
    "n_layer": 2,
    "hidden_size": 64,
    "n_head": 4,
    "vocab_size": 512,
    "seq_length": 64,
}
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 512,
    "activation_function": "relu",
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
ALL = [LLAMA, GPT2, DEEPSEEK, BLOOM, OPT, MIXTRAL, QWEN2, MISTRAL]
SCALED = {"type": "su", "factor": 4.0}, {"rope_type": "longrope", "factor": 8.0}
VALUES = [
    None,
    0,
    -1,
    1,
    3,
    7.5,
    10**12,
    10**400,
    1e308,
    "",
    "x",
    "4096",
    [],
    [1],
    {},
    {"a": 1},
    True,
    False,
    ["full_attention", 3],
    {"rope_type": 3},
    {"rope_theta": "x"},
    {"a": {"b": [1]}},
]


def message(config: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        huggingface_config.shape_of(config)
    return str(caught.value)


@pytest.mark.parametrize("value", ["4096", [4096], -1, 0, True, 7.5, {"a": 1}, 10**400])
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size"]
)
def test_a_value_of_the_wrong_type_is_refused_by_its_key(key: str, value: Any) -> None:
    assert f"{key} of 'config.json' is" in message({**LLAMA, key: value})


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("rope_theta", "1e4", "a number above 0"),
        ("rope_theta", -1, "a number above 0"),
        ("rope_theta", True, "a number"),
        ("rope_parameters", [1], "a mapping"),
        ("rope_scaling", "linear", "a mapping"),
        ("hidden_act", ["silu"], "legal: silu"),
        ("hidden_act", "gelu", "legal: silu"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("layer_types", "full", "a list"),
        ("model_type", [1], "[1]; legal:"),
        ("rope_parameters", {"rope_theta": 1e4}, "is 500000, but in rope_parameters 10000"),
    ],
)
def test_other_values_are_refused_by_their_key(key: str, value: Any, words: str) -> None:
    found = message({**LLAMA, key: value})
    assert key in found and words in found


def test_deepseeks_own_code_is_the_model_that_is_known_here() -> None:
    own = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    with_code = {**DEEPSEEK, "auto_map": own, "architectures": ["DeepseekV3ForCausalLM"]}
    assert (
        huggingface_config.shape_of(with_code).unmodelled
        == huggingface_config.shape_of(DEEPSEEK).unmodelled
    )
    other = {**own, "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert (
        "OwnForCausalLM" in huggingface_config.shape_of({**DEEPSEEK, "auto_map": other}).unmodelled
    )


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["model_type"])
def test_any_key_may_hold_anything(config: dict[str, Any]) -> None:
    pick, read, refused = random.Random(config["model_type"]), 0, 0
    for _ in range(500):
        data = copy.deepcopy(config) | {
            "rope_scaling": None,
            "rope_parameters": {},
            "layer_types": None,
        }
        for _ in range(pick.choice([1, 1, 2, 3])):
            mutate(data, pick, VALUES)
        try:
            huggingface_config.shape_of(data)
            read += 1
        except PlanError as error:
            refused += 1
            assert all(problem.message for problem in error.problems)
    assert read and refused, "a test that refuses or reads everything tests nothing"


@pytest.mark.parametrize(
    "more, words",
    [
        ({"rope_scaling": SCALED[0]}, "rope_scaling of type 'su'"),
        ({"rope_scaling": SCALED[1]}, "rope_scaling of type 'longrope'"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "3d", "rope_theta": 1e4}},
            "rope_parameters of type '3d'",
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}},
            },
            "rope_parameters that differ",
        ),
        ({"quantization_config": {"bits": 4}}, 'quantization_config {"bits": 4}'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias on the output projection"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types with linear_attention",
        ),
        (
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with sliding_attention",
        ),
        (
            {"architectures": ["LlamaCycleForCausalLM"]},
            "architectures 'LlamaCycleForCausalLM', which is no Llama",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}},
            "auto_map: the model's own code 'modeling_own.LlamaForCausalLM'",
        ),
    ],
)
def test_what_a_shape_cannot_say_is_planned_told_and_refused_where_it_would_run(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **more}))
    full = Plan.of(str(tmp_path), gpu="h100-sxm-80gb", gpus=1).resolve()
    assert words in full.shape.unmodelled
    assert words in {p.field: p.message for p in unsupported(full, "run")}["model.unmodelled"]
    assert not any(
        p.field == "model.unmodelled"
        for verb in ("estimate", "rehearse")
        for p in unsupported(full, verb)
    )
    assert words in "; ".join(huggingface_config.account(str(tmp_path)).not_modelled.values())


def test_the_catalog_says_the_same_of_a_model_as_its_configuration() -> None:
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192}
    for name, factor in (("llama-3.1-405b", 8.0), ("llama-3.2-1b", 32.0), ("llama-3.2-3b", 32.0)):
        full = Plan.of(name, gpu="h100-sxm-80gb", gpus=1).resolve()
        config = {**LLAMA, "max_position_embeddings": 131072}
        config |= {"rope_scaling": {**llama3, "factor": factor}}
        assert full.shape.rope_scaling == huggingface_config.shape_of(config).rope_scaling
        assert unsupported(full, "run") == []


@pytest.mark.parametrize(
    "more",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        {"quantization_config": None},
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": None},
        {"auto_map": {}},
        {"auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}},
        {"layer_types": ["full_attention"] * 32},
        {"attention_bias": True, "mlp_bias": True},
        {"num_hidden_layers": 40},
    ],
)
def test_what_changes_nothing_is_not_called_lost(more: dict[str, Any]) -> None:
    assert huggingface_config.shape_of({**LLAMA, **more}).unmodelled is None


def test_the_base_of_transformers_5() -> None:
    config = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    del config["rope_theta"]
    assert huggingface_config.shape_of(config).rope_theta == 1e6


def test_positions_of_gpt2_are_not_those_of_its_older_key() -> None:
    config = {key: value for key, value in GPT2.items() if key != "n_positions"} | {"n_ctx": 64}
    assert huggingface_config.shape_of(config).max_positions == 1024


def test_windows_by_family() -> None:
    assert (
        huggingface_config.shape_of(
            {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
        ).window
        == 4096
    )
    assert (
        huggingface_config.shape_of(MISTRAL).window is None
        and huggingface_config.shape_of(QWEN2).window is None
    )
    on = {**QWEN2, "use_sliding_window": True}
    assert (
        huggingface_config.shape_of(on).window == 4096
        and "max_window_layers 28" in huggingface_config.shape_of(on).unmodelled
    )
    assert huggingface_config.shape_of({**on, "max_window_layers": 0}).unmodelled is None


def test_gates_of_deepseek_add_up_to_one_as_its_configuration_says() -> None:
    assert huggingface_config.shape_of(DEEPSEEK).moe.renormalise
    assert not huggingface_config.shape_of({**DEEPSEEK, "norm_topk_prob": False}).moe.renormalise
    assert not huggingface_config.shape_of(
        {**DEEPSEEK, "model_type": "deepseek_v2"}
    ).moe.renormalise
    assert (
        "scoring_func 'softmax'"
        in huggingface_config.shape_of({**DEEPSEEK, "scoring_func": "softmax"}).unmodelled
    )


def test_gates_of_mixtral_add_up_to_one_also_where_there_is_one() -> None:
    shape = huggingface_config.shape_of({**MIXTRAL, "num_experts_per_tok": 1})
    with pytest.raises(PlanError, match=r"model\.moe\.renormalise: is true with top_k 1"):
        Plan.model_validate(
            {"model": shape.model_dump(), "cluster": {"gpu": "local", "gpus": 1}}
        ).resolve()


def test_a_single_group_of_experts_is_none_and_is_written_as_one() -> None:
    shape = huggingface_config.shape_of({**DEEPSEEK, "n_group": 1, "topk_group": 1})
    assert shape.moe is not None and (shape.moe.groups, shape.moe.top_groups) == (None, None)
    family = family_of(shape)
    assert family.write is not None and not family.unmet(shape)
    written = family.write(shape)
    assert (family.model_type, written["n_group"], written["topk_group"]) == ("deepseek_v3", 1, 1)


def test_layers_that_predict_further_tokens_are_left_out_and_said(tmp_path: Path) -> None:
    shape = huggingface_config.shape_of({**DEEPSEEK, "num_nextn_predict_layers": 1})
    assert (shape.layers, shape.mtp_layers, shape.unmodelled) == (61, 0, None)
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, "num_nextn_predict_layers": 1}))
    said = huggingface_config.account(str(tmp_path)).ignored["num_nextn_predict_layers"]
    assert "model.layers.61 on, are left out" in said
    other = huggingface_config.shape_of({**LLAMA, "num_nextn_predict_layers": 1})
    assert other.mtp_layers == 0 and other.unmodelled == "num_nextn_predict_layers 1"


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["model_type"])
def test_every_key_is_accounted_for_once(tmp_path: Path, config: dict[str, Any]) -> None:
    more = {
        "torch_dtype": "bfloat16",
        "house_style": 3,
        "layerdrop": 0.1,
        "use_cache": True,
        "scale_attn_weights": True,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    made = huggingface_config.account(str(tmp_path))
    told = [*made.used, *made.not_modelled, *made.ignored, *made.unknown]
    assert sorted(told) == sorted({**config, **more})
    assert made.unknown == {"house_style": 3} and set(made.not_modelled) == {"layerdrop"}
    idle = {key for key, why in made.ignored.items() if why == IDLE}
    assert {"torch_dtype", "use_cache", "scale_attn_weights"} == set(made.ignored) - idle
    off = {"sliding_window", "max_window_layers"} if config is QWEN2 else set()
    assert idle == off | ({"num_key_value_heads"} if config is DEEPSEEK else set())


SLIDING, FULL = ["sliding_attention"] * 32, ["full_attention"] * 32
FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    "config, idle",
    [
        (QWEN2 | {"layer_types": FULL}, "max_window_layers"),
        (QWEN2 | {"use_sliding_window": True}, ""),
        (QWEN2 | {"use_sliding_window": True, "layer_types": SLIDING}, "max_window_layers"),
        (MISTRAL | {"sliding_window": 64, "layer_types": FULL}, "sliding_window"),
        (
            LLAMA
            | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "layer_types": SLIDING},
            "sliding_window_pattern",
        ),
        (FALCON | {"new_decoder_architecture": True, "multi_query": False}, "multi_query"),
        (FALCON, "num_kv_heads"),
        (
            DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 8},
            "n_group",
        ),
    ],
)
def test_a_key_that_changes_nothing_is_not_called_used(
    tmp_path: Path, config: dict[str, Any], idle: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = huggingface_config.account(str(tmp_path))
    shape = huggingface_config.shape_of(config)
    assert (made.ignored.get(idle) == IDLE) if idle else IDLE not in made.ignored.values()
    for key, why in made.ignored.items():
        if why == IDLE:
            rest = {name: value for name, value in config.items() if name != key}
            assert huggingface_config.shape_of(rest) == shape, key


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "hidden_size": 16}'
    )
    with pytest.raises(PlanError, match="hidden_size is written twice"):
        huggingface_config.read_huggingface_config(str(tmp_path))


def test_a_rehearsal_is_that_of_the_model_without_what_is_not_modelled_and_says_so(
    tmp_path: Path,
) -> None:
    from workbench.rehearsal.rehearse import rehearse

    small = {
        **LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config, found = {**small, "num_hidden_layers": 2, "vocab_size": 256}, []
    for more in ({}, {"rope_scaling": SCALED[1]}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        found.append(rehearse(Plan.of(str(tmp_path), gpu="h100-sxm-80gb", gpus=1)))
    plain, scaled = found
    assert scaled.summary()["not_modelled"] == "rope_scaling of type 'longrope'"
    assert "not_modelled" not in plain.summary() and scaled.memory.equals(plain.memory)


def test_plan_lists_every_key_estimate_says_what_it_leaves_out_and_verify_refuses(
    ask: Ask, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "rope_scaling": SCALED[1], "house_style": 1})
    )
    choice = ["--model", tmp_path, "--gpu", "h100-sxm-80gb", "--gpus", "1"]
    code, out, _ = ask("plan", *choice, "--json")
    config = json.loads(out)["config"]
    assert code == 0 and config["not_modelled"] == {
        "rope_scaling": "rope_scaling of type 'longrope'"
    }
    assert config["unknown"] == {"house_style": 1} and "rope_theta" in config["used"]
    code, out, _ = ask("plan", *choice)
    assert "unknown: house_style = 1" in out and "planned without, and refused by run" in " ".join(
        out.split()
    )
    code, out, _ = ask("estimate", *choice, "--json")
    assert json.loads(out)["not_modelled"] == "rope_scaling of type 'longrope'"
    code, _, err = ask("verify", *choice)
    assert code == 2 and "rope_scaling of type 'longrope'" in err
