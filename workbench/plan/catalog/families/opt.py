"""OPT."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.plan.catalog.families.common_keys import ACTIVATIONS, activation
from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading


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
        "mlp": activation(reading, "activation_function", ACTIVATIONS, "relu"),
        "biases": "all" if reading.flag("enable_bias", True) else "none",
        "tied": reading.flag("tie_word_embeddings", True),
    }


OPT = Family("opt", "OPT", _opt)
