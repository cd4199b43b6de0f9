"""BLOOM."""

from __future__ import annotations

from workbench.plan.catalog.families.family import Config, Family, Fields
from workbench.plan.catalog.families.gpt2 import GPT2_STYLE
from workbench.plan.catalog.families.stored_parts import FusedByHead, TensorNames
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape


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


def _write(shape: Shape) -> Config:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "seq_length": shape.max_positions,
        "layer_norm_epsilon": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


NAMES = TensorNames(
    modules={
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    block="transformer.h.{}",
    block_modules={
        "attention_norm": "input_layernorm",
        **{
            f"attention.{which}": FusedByHead("self_attention.query_key_value", which)
            for which in "qkv"
        },
        "attention.o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    optional_prefix="transformer.",
)
BLOOM_STYLE = {**GPT2_STYLE, "positions": ("alibi",), "embedding_norm": (True,)}
BLOOM_STYLE |= {"mlp": ("gelu",), "ffn": lambda shape: (4 * shape.hidden,)}
BLOOM = Family("bloom", "Bloom", _bloom, _write, NAMES, BLOOM_STYLE)
