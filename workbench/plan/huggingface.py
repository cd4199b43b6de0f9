"""A Hugging Face `config.json` as a shape: one small reader a model family; an unknown family is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.plan.errors import refuse
from workbench.plan.explain import plan_error
from workbench.plan.shape import Shape

Config = dict[str, Any]
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu": "relu"}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def read(path: str) -> Shape:
    """The shape that a config.json, or the folder that holds one, describes.

    Raises `PlanError` naming `model` where the file is missing, is no configuration, or is of a family not known here.
    """
    file = Path(path) / "config.json" if os.path.isdir(path) else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse("model", f"'{file}' cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise refuse("model", f"'{file}' is not JSON: {error}") from None
    except RecursionError:
        raise refuse("model", f"'{file}' is no model configuration: it is nested too deeply") from None
    if not isinstance(config, dict):
        raise refuse("model", f"'{file}' is no model configuration: it holds a {type(config).__name__}")
    return shape_of(config, name=str(config.get("_name_or_path") or file.resolve().parent.name), where=str(file))


def shape_of(config: Config, name: str = "custom", where: str = "config.json") -> Shape:
    """The shape of a configuration already read."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise refuse("model", f"'{where}' has model_type '{family}'; legal: {', '.join(sorted(FAMILIES))}")
    try:
        fields = {key: value for key, value in FAMILIES[family](config).items() if value is not None}
        return Shape.model_validate({"name": name, **fields})
    except KeyError as error:
        raise refuse("model", f"'{where}' ({family}) has no {error.args[0]}") from None
    except ValidationError as error:
        raise plan_error(error, fields) from None


def _activation(config: Config, key: str, known: dict[str, str], default: str) -> str:
    name = str(config.get(key, default))
    if name not in known:
        raise refuse("model", f"{key} is '{name}'; legal: {', '.join(known)}")
    return known[name]


def _llama(config: Config) -> Config:
    """Llama, Mistral: RMSNorm, rotary positions, gated feed-forward layer, grouped keys and values."""
    if config.get("mlp_bias") and not config.get("attention_bias"):
        raise refuse("model", "mlp_bias is true and attention_bias is not; legal here: both, or neither")
    return {
        "layers": config["num_hidden_layers"], "hidden": config["hidden_size"], "ffn": config["intermediate_size"],
        "heads": config["num_attention_heads"], "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"), "vocab": config["vocab_size"],
        "max_positions": config.get("max_position_embeddings"), "norm_epsilon": config.get("rms_norm_eps"),
        "mlp": _activation(config, "hidden_act", GATED, "silu"), "positions": "rope", "norm": "rmsnorm",
        "biases": "all" if config.get("mlp_bias") else "qkv" if config.get("attention_bias") else "none",
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": _theta(config), "window": config.get("sliding_window"),
    }  # fmt: skip


def _theta(config: Config) -> float:
    inner = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or inner.get("rope_theta") or 10000.0)


def _qwen2(config: Config) -> Config:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return {**_llama(config), "biases": "qkv", "window": window}


def _mixtral(config: Config) -> Config:
    moe = {
        "experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"],
        "ffn": config["intermediate_size"],
    }  # fmt: skip
    return {**_llama(config), "moe": moe}


def _deepseek(config: Config) -> Config:
    """DeepSeek-V2 and V3: latent attention, fine-grained experts beside shared ones, leading dense layers."""
    if config.get("moe_layer_freq", 1) != 1:
        raise refuse("model", f"moe_layer_freq is {config['moe_layer_freq']}; legal here: 1")
    moe = {
        "experts": config["n_routed_experts"], "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"], "shared": config.get("n_shared_experts") or 0,
        "first_dense": config.get("first_k_dense_replace", 0),
    }  # fmt: skip
    mla = {
        "kv_rank": config["kv_lora_rank"], "q_rank": config.get("q_lora_rank"), "rope_dim": config["qk_rope_head_dim"],
        "nope_dim": config["qk_nope_head_dim"], "value_dim": config["v_head_dim"],
    }  # fmt: skip
    return {**_llama(config), "kv_heads": None, "head_dim": None, "moe": moe, "mla": mla}


def _gpt2(config: Config) -> Config:
    return {
        "layers": config["n_layer"], "hidden": config["n_embd"], "heads": config["n_head"],
        "ffn": config.get("n_inner") or 4 * config["n_embd"], "vocab": config["vocab_size"],
        "max_positions": config.get("n_positions") or config.get("n_ctx"), "positions": "learned", "norm": "layernorm",
        "norm_epsilon": config.get("layer_norm_epsilon"),
        "mlp": _activation(config, "activation_function", ACTIVATIONS, "gelu_new"), "biases": "all",
        "tied": bool(config.get("tie_word_embeddings", True)),
    }  # fmt: skip


def _opt(config: Config) -> Config:
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        raise refuse("model", "word_embed_proj_dim differs from hidden_size; legal here: the same")
    if not config.get("do_layer_norm_before", True):
        raise refuse("model", "do_layer_norm_before is false; legal here: true")
    return {
        "layers": config["num_hidden_layers"], "hidden": config["hidden_size"], "heads": config["num_attention_heads"],
        "ffn": config["ffn_dim"], "vocab": config["vocab_size"], "max_positions": config.get("max_position_embeddings"),
        "positions": "learned", "norm": "layernorm",
        "mlp": _activation(config, "activation_function", ACTIVATIONS, "relu"),
        "biases": "all" if config.get("enable_bias", True) else "none",
        "tied": bool(config.get("tie_word_embeddings", True)),
    }  # fmt: skip


def _bloom(config: Config) -> Config:
    hidden = config.get("hidden_size") or config["n_embed"]
    return {
        "layers": config.get("n_layer") or config["num_hidden_layers"], "hidden": hidden, "ffn": 4 * hidden,
        "heads": config.get("n_head") or config["num_attention_heads"], "vocab": config["vocab_size"],
        "max_positions": config.get("seq_length"), "positions": "alibi", "norm": "layernorm",
        "norm_epsilon": config.get("layer_norm_epsilon"), "embedding_norm": True, "mlp": "gelu", "biases": "all",
        "tied": bool(config.get("tie_word_embeddings", True)),
    }  # fmt: skip


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "llama": _llama, "mistral": _llama, "qwen2": _qwen2, "gpt2": _gpt2, "opt": _opt, "bloom": _bloom,
    "mixtral": _mixtral, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
}  # fmt: skip
"""model_type -> its reader."""
