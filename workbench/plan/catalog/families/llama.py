"""Llama 1 to 3; Mistral, which attends within a window; Phi-3, and Phi-4, which calls itself so,
with fused projections.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import refuse
from workbench.plan.catalog.families.common_keys import (
    FULL,
    GATED,
    SLIDING,
    activation,
    layer_kinds,
    own_window,
    read_windows,
)
from workbench.plan.catalog.families.family import (
    ANY,
    PLAIN_ATTENTION,
    Config,
    Family,
    Fields,
    Legal,
)
from workbench.plan.catalog.families.rotary_keys import read_rotary, write_rotary
from workbench.plan.catalog.families.stored_parts import FusedRows, TensorNames
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape

LLAMA_NAMES = TensorNames(
    modules={
        "embedding.tokens": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    block="model.layers.{}",
    block_modules={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
"""Query and key rows need no permutation: rotary embedding pairs the two parts of a head in
both.
"""


def read_llama(reading: Reading, **usual: Any) -> Fields:
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
        "layers": (layers := read_layers(reading)),
        "hidden": reading.whole("hidden_size"),
        "ffn": reading.whole("intermediate_size"),
        "heads": reading.whole("num_attention_heads"),
        "kv_heads": reading.whole("num_key_value_heads", usual.get("kv_heads")),
        "head_dim": reading.whole("head_dim", None),
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("max_position_embeddings", usual.get("positions", 2048)),
        "norm_epsilon": reading.number("rms_norm_eps", usual.get("epsilon", 1e-6)),
        "mlp": activation(reading, *usual.get("activation", ("hidden_act", GATED, "silu"))),
        "positions": "rope",
        "norm": "rmsnorm",
        "biases": "all" if mlp else "qkv" if attention else "none",
        "tied": reading.flag("tie_word_embeddings", False),
        **read_rotary(
            reading,
            usual.get("theta", 10000.0),
            usual.get("scaled", True),
            _head_dim(reading) if "share" in usual else None,
            usual.get("share"),
            usual.get("of_kind"),
        ),
        **read_windows(reading, layers, usual.get("window"), usual.get("kinds")),
    }


def read_layers(reading: Reading) -> int:
    """`num_hidden_layers`."""
    return int(reading.whole("num_hidden_layers", most=MOST_LAYERS))


def _head_dim(reading: Reading) -> int:
    heads = reading.whole("num_attention_heads")
    return int(reading.whole("head_dim", None) or reading.whole("hidden_size") // heads)


def _mistral(reading: Reading) -> Fields:
    # With layer_types, transformers takes the configuration for Ministral's, which reads them.
    window = own_window(reading, 4096)
    kinds = [SLIDING if window else FULL] * read_layers(reading)
    return read_llama(reading, kv_heads=8, positions=131072, window=window, kinds=kinds)


def write_llama(shape: Shape) -> Config:
    """The keys that Llama's descendants share."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu" if shape.mlp == "swiglu" else "gelu_pytorch_tanh",
        "rms_norm_eps": shape.norm_epsilon,
        **write_rotary(shape),
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _write_with_biases(shape: Shape) -> Config:
    biases = shape.biases == "all"
    return {**write_llama(shape), "attention_bias": biases, "mlp_bias": biases}


def _write_mistral(shape: Shape) -> Config:
    kinds = {"layer_types": layer_kinds(shape)} if shape.full_attention_every else {}
    return {**write_llama(shape), "sliding_window": shape.window, **kinds}


LLAMA_STYLE: dict[str, Legal] = {
    **PLAIN_ATTENTION,
    "positions": ("rope",),
    "norm": ("rmsnorm",),
    "mlp": ("swiglu", "geglu"),
    "embedding_norm": (False,),
    "moe": (None,),
    "mla": (None,),
    "window": (None,),
    "biases": ("none", "all"),
}
"""What Llama expresses; its descendants differ in a field or two."""
LLAMA = Family("llama", "Llama", read_llama, _write_with_biases, LLAMA_NAMES, LLAMA_STYLE)
MISTRAL = Family(
    "mistral",
    "Mistral",
    _mistral,
    _write_mistral,
    LLAMA_NAMES,
    {**LLAMA_STYLE, "window": (ANY,), "full_attention_every": (None, ANY), "biases": ("none",)},
)


def _phi3(reading: Reading) -> Fields:
    share = reading.number("partial_rotary_factor", 1.0)
    reading.whole("original_max_position_embeddings", None)
    window = own_window(reading)
    return read_llama(reading, positions=4096, epsilon=1e-5, share=share, window=window)


def _write_phi3(shape: Shape) -> Config:
    pad = {"pad_token_id": None}
    share = shape.rotated_width / int(shape.head_dim or 1)
    own = {"sliding_window": shape.window, "partial_rotary_factor": share}
    return {**write_llama(shape), **own, **pad}


PHI3_NAMES = TensorNames(
    modules=LLAMA_NAMES.modules,
    block=LLAMA_NAMES.block,
    block_modules={
        **LLAMA_NAMES.block_modules,
        "attention.q": FusedRows("self_attn.qkv_proj", lambda shape: 0),
        "attention.k": FusedRows("self_attn.qkv_proj", lambda shape: shape.q_width),
        "attention.v": FusedRows(
            "self_attn.qkv_proj", lambda shape: shape.q_width + shape.kv_width
        ),
        "mlp.gate": FusedRows("mlp.gate_up_proj", lambda shape: 0),
        "mlp.up": FusedRows("mlp.gate_up_proj", lambda shape: shape.ffn),
    },
)
PHI3_STYLE = {**LLAMA_STYLE, "window": (None, ANY), "biases": ("none",), "rotary_dim": (None, ANY)}
PHI3 = Family("phi3", "Phi3", _phi3, _write_phi3, PHI3_NAMES, PHI3_STYLE)
"""A model that Llama expresses too is written as Llama."""
