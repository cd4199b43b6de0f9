"""Falcon 7B, 40B, 180B and 11B, whose branches are parallel."""

from __future__ import annotations

from workbench.plan.catalog.families.common_keys import ACTIVATIONS, activation, written_activation
from workbench.plan.catalog.families.family import PLAIN_ATTENTION, Config, Family, Fields, Legal
from workbench.plan.catalog.families.rotary_keys import read_rotary, write_rotary
from workbench.plan.catalog.families.stored_parts import FusedByHead, NamedByShape, TensorNames
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape


def _read(reading: Reading) -> Fields:
    hidden, heads = reading.whole("hidden_size"), reading.whole("num_attention_heads")
    if reading.flag("alibi", False):
        reading.lacks("alibi", "alibi, whose slopes are divided by the root of head_dim too")
    grouped = reading.flag("new_decoder_architecture", False)
    kv_heads = reading.whole("num_kv_heads", heads)
    several, in_parallel = reading.flag("multi_query", True), reading.flag("parallel_attn", True)
    norms = reading.whole("num_ln_in_parallel_attn", 2 if grouped else 1, most=2)
    if not grouped:
        kv_heads, norms = 1 if several else heads, 1
    parallel = "two_norms" if norms == 2 else "one_norm"
    return {
        "layers": reading.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": reading.whole("ffn_hidden_size", None) or 4 * hidden,
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("max_position_embeddings", 2048),
        "positions": "rope",
        **read_rotary(reading, 10000.0),
        "norm": "layernorm",
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "mlp": activation(reading, "activation", ACTIVATIONS, "gelu"),
        "biases": "all" if reading.flag("bias", False) else "none",
        "tied": reading.flag("tie_word_embeddings", True),
        "parallel_residual": parallel if grouped or in_parallel else None,
    }


def _write(shape: Shape) -> Config:
    grouped = _is_grouped(shape)
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "ffn_hidden_size": shape.ffn,
        "max_position_embeddings": shape.max_positions,
        "activation": written_activation(shape),
        "layer_norm_epsilon": shape.norm_epsilon,
        **write_rotary(shape),
        "alibi": False,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": (1 + (shape.parallel_residual == "two_norms"))
        if grouped
        else None,
        "multi_query": shape.kv_heads == 1,
        "parallel_attn": shape.parallel_residual is not None,
        "bias": shape.biases == "all",
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _is_grouped(shape: Shape) -> bool:
    """Whether the shape is of 40B's kind (`new_decoder_architecture`)."""
    return shape.parallel_residual == "two_norms" or shape.kv_heads not in (1, shape.heads)


def _first_norm(shape: Shape) -> str:
    return "ln_attn" if shape.parallel_residual == "two_norms" else "input_layernorm"


def _second_norm(shape: Shape) -> str:
    return "ln_mlp" if shape.parallel_residual == "two_norms" else "post_attention_layernorm"


def _branches(shape: Shape) -> tuple[str | None, ...]:
    return ("one_norm", "two_norms") if _is_grouped(shape) else (None, "one_norm")


NAMES = TensorNames(
    modules={
        "embedding.tokens": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    block="transformer.h.{}",
    block_modules={
        "attention_norm": NamedByShape(_first_norm),
        **{
            f"attention.{which}": FusedByHead("self_attention.query_key_value", which)
            for which in "qkv"
        },
        "attention.o": "self_attention.dense",
        "mlp_norm": NamedByShape(_second_norm),
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    ignored=r"rotary(_emb)?\.inv_freq",
    optional_prefix="transformer.",
)
STYLE: dict[str, Legal] = {
    **PLAIN_ATTENTION,
    "positions": ("rope",),
    "norm": ("layernorm",),
    "mlp": ("gelu_exact", "gelu", "relu"),
    "biases": ("none", "all"),
    "parallel_residual": _branches,
    "embedding_norm": (False,),
    "moe": (None,),
    "mla": (None,),
    "window": (None,),
    "head_dim": lambda shape: (shape.hidden // shape.heads,),
}
FALCON = Family("falcon", "Falcon", _read, _write, NAMES, STYLE)
