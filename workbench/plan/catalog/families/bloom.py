"""BLOOM."""

from __future__ import annotations

from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading


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


BLOOM = Family("bloom", "Bloom", _bloom)
