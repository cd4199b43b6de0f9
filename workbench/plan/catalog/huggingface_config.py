"""A Hugging Face `config.json` as a shape: one small reader a model family; an unknown family is
refused by name.

What a configuration computes beyond the fields of a shape (stretched rotary frequencies, say) is
kept as the shape's `unmodelled`: it is estimated and rehearsed without, and refused where it would
run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import PlanError, refuse
from workbench.fields.validation_messages import plan_error
from workbench.plan.catalog.huggingface_code import note_other_classes
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Account, Reading
from workbench.plan.model.model_shape import Shape
from workbench.safe_io import json_files
from workbench.safe_io.files import read_some, unread
from workbench.untrusted_text import shown

Config = dict[str, Any]
Fields = dict[str, Any]
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
MOST_BYTES = 16 * 2**20
"""Of a config.json: the largest published are a thousandth of it."""
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def read_huggingface_config(path: str) -> Shape:
    """The shape that a config.json, or the folder that holds one, describes.

    Raises `PlanError` naming `model` where the file is missing, is no configuration, or is of a
    family not known here.
    """
    return _read(path)[0]


def account(path: str) -> Account:
    """What `read_huggingface_config` makes of each key of the configuration at `path`. Raises
    `PlanError` as it does.
    """
    return _read(path)[1].account()


def _read(path: str) -> tuple[Shape, Reading]:
    file = Path(path) / "config.json" if os.path.isdir(path) else Path(path)
    try:
        config = json_files.parse(read_some(file, MOST_BYTES), where="", constants=True)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("model", f"'{file}' cannot be read: {unread(error)}") from None
    except PlanError as error:
        why = f"{error.problems[0].field} {error.problems[0].message}".strip()
        raise refuse("model", f"'{file}' is no model configuration: {why}") from None
    if not isinstance(config, dict):
        raise refuse(
            "model", f"'{file}' is no model configuration: it holds {shown(config)}, not a mapping"
        )
    name = config.get("_name_or_path")
    reading = Reading(config, str(file))
    return _shape(
        reading, name if isinstance(name, str) and name else file.resolve().parent.name
    ), reading


def shape_of(config: Config, name: str = "custom", where: str = "config.json") -> Shape:
    """The shape of a configuration already read."""
    return _shape(Reading(config, where), name)


def _shape(reading: Reading, name: str) -> Shape:
    family = reading.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        legal = ", ".join(sorted(FAMILIES))
        raise refuse("model", f"'{reading.where}' has model_type {shown(family)}; legal: {legal}")
    fields = {key: value for key, value in FAMILIES[family](reading).items() if value is not None}
    note_other_classes(reading, family)
    if lacking := reading.account().not_modelled:
        fields["unmodelled"] = "; ".join(lacking.values())
    try:
        return Shape.model_validate({"name": name, **fields})
    except ValidationError as error:
        raise plan_error(error, fields, Shape) from None


def _activation(reading: Reading, key: str, known: dict[str, str], default: str) -> str:
    name = reading.get(key, default)
    if not isinstance(name, str) or name not in known:
        raise refuse(
            "model", f"{key} of '{reading.where}' is {shown(name)}; legal: {', '.join(known)}"
        )
    return known[name]


def _llama(reading: Reading, **usual: Any) -> Fields:
    """Llama, Mistral: RMSNorm, rotary positions, gated feed-forward layer, grouped keys and
    values.
    """
    attention, mlp = reading.flag("attention_bias", False), reading.flag("mlp_bias", False)
    if mlp and not attention:
        raise refuse(
            "model", "mlp_bias is true and attention_bias is not; legal here: both, or neither"
        )
    if attention and not mlp:
        reading.lacks("attention_bias", "attention_bias on the output projection too")
    return {
        "layers": reading.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": reading.whole("hidden_size"),
        "ffn": reading.whole("intermediate_size"),
        "heads": reading.whole("num_attention_heads"),
        "kv_heads": reading.whole("num_key_value_heads", usual.get("kv_heads")),
        "head_dim": reading.whole("head_dim", None),
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("max_position_embeddings", usual.get("positions", 2048)),
        "norm_epsilon": reading.number("rms_norm_eps", usual.get("epsilon", 1e-6)),
        "mlp": _activation(reading, "hidden_act", GATED, "silu"),
        "positions": "rope",
        "norm": "rmsnorm",
        "biases": "all" if mlp else "qkv" if attention else "none",
        "tied": reading.flag("tie_word_embeddings", False),
        "rope_theta": _theta(reading, usual.get("theta", 10000.0)),
        "window": _window(reading),
    }


def _theta(reading: Reading, default: float) -> float:
    """The rotary base: its own key, or in transformers 5 one of `rope_parameters`; stretched
    frequencies are noted.
    """
    theta, inner = reading.number("rope_theta", None), reading.section("rope_parameters")
    by_kind = [part for part in inner.values() if isinstance(part, dict)]
    if len({json.dumps(part, sort_keys=True) for part in by_kind}) > 1:
        reading.lacks("rope_parameters", "rope_parameters that differ between kinds of layers")
    scaling = by_kind[0] if by_kind else inner
    for key, section in (
        ("rope_scaling", reading.section("rope_scaling")),
        ("rope_parameters", scaling),
    ):
        kind = section.get("rope_type", section.get("type"))
        if kind not in (None, "default") and key not in reading.not_modelled:
            reading.lacks(key, f"{key} of type {shown(kind)}")
        if section.get("partial_rotary_factor") not in (None, 1):
            reading.lacks(
                key, f"{key} with partial_rotary_factor {shown(section['partial_rotary_factor'])}"
            )
    also = reading.number("rope_theta", None, scaling)
    if theta is not None and also is not None and theta != also:
        raise refuse(
            "model",
            f"rope_theta of '{reading.where}' is {theta:g}, but in rope_parameters {also:g}; "
            f"keep one",
        )
    return next(found for found in (theta, also, default) if found is not None)


def _window(reading: Reading) -> int | None:
    """The sliding window; a model in which only some layers have it is noted."""
    window, kinds = reading.whole("sliding_window", None), reading.get("layer_types", [])
    if not isinstance(kinds, list):
        raise reading.wrong("layer_types", kinds, "a list with the kind of each layer")
    other = {str(kind) for kind in kinds} - (
        {"full_attention"} if window is None else {"sliding_attention"}
    )
    if other:
        reading.lacks("layer_types", f"layer_types with {', '.join(sorted(other))[:60]} among them")
    return window if not kinds or "sliding_attention" in kinds else None


def _mistral(reading: Reading) -> Fields:
    fields = _llama(reading, kv_heads=8, positions=131072)
    absent = "sliding_window" not in reading.config
    return fields | ({"window": 4096} if absent else {})


def _qwen2(reading: Reading) -> Fields:
    """Qwen2: biases on query, key and value; a window only where it is turned on, from
    `max_window_layers` on.
    """
    fields = {**_llama(reading, kv_heads=32, positions=32768), "biases": "qkv"}
    full = reading.whole("max_window_layers", 28, least=0)
    if not reading.flag("use_sliding_window", False) or full >= fields["layers"]:
        reading.not_modelled.pop("layer_types", None)
        return fields | {"window": None}
    if fields["window"] is not None and full:
        reading.lacks(
            "max_window_layers", f"max_window_layers {full}: that many layers attend to all"
        )
    return fields


def _mixtral(reading: Reading) -> Fields:
    moe = {
        "experts": reading.whole("num_local_experts", 8),
        "top_k": reading.whole("num_experts_per_tok", 2),
        "ffn": reading.whole("intermediate_size"),
    }
    return {**_llama(reading, kv_heads=8, positions=131072, epsilon=1e-5, theta=1e6), "moe": moe}


def _deepseek(reading: Reading) -> Fields:
    """DeepSeek-V2 and V3: latent attention, fine-grained experts beside shared ones, leading dense
    layers.
    """
    if (every := reading.whole("moe_layer_freq", 1)) != 1:
        raise refuse("model", f"moe_layer_freq is {every}; legal here: 1")
    third = reading.config.get("model_type") == "deepseek_v3"
    moe = {
        "experts": reading.whole("n_routed_experts"),
        "top_k": reading.whole("num_experts_per_tok"),
        "ffn": reading.whole("moe_intermediate_size"),
        "shared": reading.whole("n_shared_experts", 0, least=0),
        "first_dense": reading.whole("first_k_dense_replace", 0, least=0),
        "renormalise": reading.flag("norm_topk_prob", third),
    }
    mla = {
        "kv_rank": reading.whole("kv_lora_rank"),
        "q_rank": reading.whole("q_lora_rank", None),
        "rope_dim": reading.whole("qk_rope_head_dim"),
        "nope_dim": reading.whole("qk_nope_head_dim"),
        "value_dim": reading.whole("v_head_dim"),
    }
    reading.whole("topk_group", None)
    fields = {**_llama(reading), "kv_heads": None, "head_dim": None, "moe": moe, "mla": mla}
    further = reading.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS)
    return fields | {"layers": fields["layers"] + further, "mtp_layers": further or None}


def _gpt2(reading: Reading) -> Fields:
    hidden = reading.whole("n_embd")
    return {
        "layers": reading.whole("n_layer", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": reading.whole("n_head"),
        "ffn": reading.whole("n_inner", None) or 4 * hidden,
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("n_positions", reading.whole("n_ctx", 1024)),
        "positions": "learned",
        "norm": "layernorm",
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "mlp": _activation(reading, "activation_function", ACTIVATIONS, "gelu_new"),
        "biases": "all",
        "tied": reading.flag("tie_word_embeddings", True),
    }


def _opt(reading: Reading) -> Fields:
    hidden = reading.whole("hidden_size")
    if reading.whole("word_embed_proj_dim", hidden) != hidden:
        raise refuse("model", "word_embed_proj_dim differs from hidden_size; legal here: the same")
    if not reading.flag("do_layer_norm_before", True):
        raise refuse("model", "do_layer_norm_before is false; legal here: true")
    return {
        "layers": reading.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": reading.whole("num_attention_heads"),
        "ffn": reading.whole("ffn_dim"),
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("max_position_embeddings", 2048),
        "positions": "learned",
        "norm": "layernorm",
        "mlp": _activation(reading, "activation_function", ACTIVATIONS, "relu"),
        "biases": "all" if reading.flag("enable_bias", True) else "none",
        "tied": reading.flag("tie_word_embeddings", True),
    }


def _bloom(reading: Reading) -> Fields:
    hidden = reading.whole("hidden_size", None) or reading.whole("n_embed")
    layers = reading.whole("n_layer", None, most=MOST_LAYERS) or reading.whole(
        "num_hidden_layers", most=MOST_LAYERS
    )
    return {
        "layers": layers,
        "hidden": hidden,
        "ffn": 4 * hidden,
        "heads": reading.whole("n_head", None) or reading.whole("num_attention_heads"),
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("seq_length", None),
        "positions": "alibi",
        "norm": "layernorm",
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "embedding_norm": True,
        "mlp": "gelu",
        "biases": "all",
        "tied": reading.flag("tie_word_embeddings", True),
    }


FAMILIES: dict[str, Callable[[Reading], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""model_type -> its reader."""
