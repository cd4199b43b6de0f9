"""GPT-2."""

from __future__ import annotations

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
        "max_positions": reading.whole("n_positions", reading.whole("n_ctx", 1024)),
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
