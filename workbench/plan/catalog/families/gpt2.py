"""GPT-2 and OPT: LayerNorm, biases and learned positions."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.plan.catalog.families.common_keys import ACTIVATIONS, activation, written_activation
from workbench.plan.catalog.families.family import PLAIN_ATTENTION, Config, Family, Fields, Legal
from workbench.plan.catalog.families.stored_parts import Alone, FusedRows, TensorNames
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape


def _gpt2(reading: Reading) -> Fields:
    hidden = reading.whole("n_embd")
    return {
        "layers": reading.whole("n_layer", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": reading.whole("n_head"),
        "ffn": reading.whole("n_inner", None) or 4 * hidden,
        "vocab": reading.whole("vocab_size"),
        "max_positions": reading.whole("n_positions", 1024),
        "positions": "learned",
        "norm": "layernorm",
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "mlp": activation(reading, "activation_function", ACTIVATIONS, "gelu_new"),
        "biases": "all",
        "tied": reading.flag("tie_word_embeddings", True),
    }


def _write(shape: Shape) -> Config:
    return {
        "vocab_size": shape.vocab,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.max_positions,
        "activation_function": written_activation(shape),
        "layer_norm_epsilon": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


NAMES = TensorNames(
    modules={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    block="transformer.h.{}",
    block_modules={
        "attention_norm": "ln_1",
        "attention.q": FusedRows("attn.c_attn", lambda shape: 0, transposed=True),
        "attention.k": FusedRows("attn.c_attn", lambda shape: shape.hidden, transposed=True),
        "attention.v": FusedRows("attn.c_attn", lambda shape: 2 * shape.hidden, transposed=True),
        "attention.o": Alone("attn.c_proj", transposed=True),
        "mlp_norm": "ln_2",
        "mlp.up": Alone("mlp.c_fc", transposed=True),
        "mlp.down": Alone("mlp.c_proj", transposed=True),
    },
    ignored=r"attn\.(masked_)?bias",
    optional_prefix="transformer.",
)
"""Its linear layers are `Conv1D`, stored [in, out]; files of OpenAI's weights hold causal masks."""
GPT2_STYLE: dict[str, Legal] = {
    **PLAIN_ATTENTION,
    "positions": ("learned",),
    "norm": ("layernorm",),
    "mlp": ("gelu", "gelu_exact"),
    "biases": ("all",),
    "embedding_norm": (False,),
    "moe": (None,),
    "mla": (None,),
    "window": (None,),
    "kv_heads": lambda shape: (shape.heads,),
    "head_dim": lambda shape: (shape.hidden // shape.heads,),
}
GPT2 = Family("gpt2", "GPT2", _gpt2, _write, NAMES, GPT2_STYLE, model_class="LMHeadModel")


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


def _write_opt(shape: Shape) -> Config:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "word_embed_proj_dim": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "ffn_dim": shape.ffn,
        "max_position_embeddings": shape.max_positions,
        "activation_function": written_activation(shape),
        "do_layer_norm_before": True,
        "enable_bias": shape.biases == "all",
        "tie_word_embeddings": shape.tied,
        "dropout": 0.0,
    }


OPT_NAMES = TensorNames(
    modules={
        "embedding.tokens": "model.decoder.embed_tokens",
        "embedding.positions": Alone("model.decoder.embed_positions", first=2),
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    block="model.decoder.layers.{}",
    block_modules={
        "attention_norm": "self_attn_layer_norm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    optional_prefix="model.",
)
"""Its position table begins with two rows that are not read."""
OPT_STYLE = {**GPT2_STYLE, "mlp": ("relu", "gelu_exact"), "biases": ("all", "none")}
OPT = Family("opt", "OPT", _opt, _write_opt, OPT_NAMES, OPT_STYLE | {"norm_epsilon": (1e-5,)})
