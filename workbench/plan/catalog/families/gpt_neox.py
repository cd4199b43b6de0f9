"""GPT-NeoX: Pythia, GPT-NeoX-20B, whose branches are parallel."""

from __future__ import annotations

from workbench.plan.catalog.families.common_keys import ACTIVATIONS, activation, written_activation
from workbench.plan.catalog.families.family import (
    ANY,
    PLAIN_ATTENTION,
    Config,
    Family,
    Fields,
    Legal,
)
from workbench.plan.catalog.families.rotary_keys import read_rotary, write_rotary
from workbench.plan.catalog.families.stored_parts import FusedByHead, TensorNames
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape

USUAL_SHARE = 0.25
"""Of a head that is rotated, where a configuration says none."""


def _read(reading: Reading) -> Fields:
    hidden, heads = reading.whole("hidden_size"), reading.whole("num_attention_heads")
    if not reading.flag("attention_bias", True):
        reading.lacks("attention_bias", "attention_bias false beside biases of the MLP")
    theta = reading.number("rotary_emb_base", 10000.0) or 10000.0
    share = reading.number("rotary_pct", USUAL_SHARE)
    return {
        "layers": reading.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "ffn": reading.whole("intermediate_size"),
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("max_position_embeddings", 2048),
        "positions": "rope",
        **read_rotary(reading, theta, head_dim=hidden // heads, share=share),
        "norm": "layernorm",
        "norm_epsilon": reading.number("layer_norm_eps", 1e-5),
        "mlp": activation(reading, "hidden_act", ACTIVATIONS, "gelu"),
        "biases": "all",
        "tied": reading.flag("tie_word_embeddings", False),
        "parallel_residual": "two_norms" if reading.flag("use_parallel_residual", True) else None,
    }


def _write(shape: Shape) -> Config:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": written_activation(shape),
        "layer_norm_eps": shape.norm_epsilon,
        "rotary_pct": shape.rotated_width / int(shape.head_dim or 1),
        "rotary_emb_base": shape.rope_theta,
        **write_rotary(shape),
        "use_parallel_residual": shape.parallel_residual is not None,
        "attention_bias": True,
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


NAMES = TensorNames(
    modules={
        "embedding.tokens": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    block="gpt_neox.layers.{}",
    block_modules={
        "attention_norm": "input_layernorm",
        **{
            f"attention.{which}": FusedByHead("attention.query_key_value", which) for which in "qkv"
        },
        "attention.o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    ignored=r"attention\.((masked_)?bias|rotary_emb\.inv_freq)",
)
"""Files hold causal masks and rotary frequencies too."""
STYLE: dict[str, Legal] = {
    **PLAIN_ATTENTION,
    "positions": ("rope",),
    "rotary_dim": (None, ANY),
    "norm": ("layernorm",),
    "mlp": ("gelu_exact", "gelu", "relu"),
    "biases": ("all",),
    "parallel_residual": (None, "two_norms"),
    "embedding_norm": (False,),
    "moe": (None,),
    "mla": (None,),
    "window": (None,),
    "kv_heads": lambda shape: (shape.heads,),
    "head_dim": lambda shape: (shape.hidden // shape.heads,),
}
GPT_NEOX = Family("gpt_neox", "GPTNeoX", _read, _write, NAMES, STYLE)
