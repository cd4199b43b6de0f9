"""Gemma 2 (2408.00118): norms at both ends of a branch, which multiply by 1 + weight; scaled
embeddings; soft-caps; windows in every second layer.
"""

from __future__ import annotations

import math

from workbench.plan.catalog.families.common_keys import GATED, activation
from workbench.plan.catalog.families.family import ANY, Config, Family, Fields, Legal
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.families.stored_parts import TensorNames
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape

SLIDING, FULL = "sliding_attention", "full_attention"


def _kinds(layers: int, every: int) -> list[str]:
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _gemma2(reading: Reading) -> Fields:
    kinds = reading.get("layer_types")
    fields = read_llama(reading, kv_heads=4, positions=8192)
    reading.not_modelled.pop("layer_types", None)
    if kinds is not None and kinds != _kinds(fields["layers"], 2):
        reading.lacks("layer_types", "layer_types that do not alternate")
    score_width = reading.number("query_pre_attn_scalar", 256)
    return fields | {
        "head_dim": fields["head_dim"] or 256,
        "mlp": activation(reading, "hidden_activation", GATED, "gelu_pytorch_tanh"),
        "tied": reading.flag("tie_word_embeddings", True),
        "window": reading.whole("sliding_window", 4096),
        "full_attention_every": 2,
        "attention_scale": float(score_width or 256) ** -0.5,
        "attention_softcap": reading.number("attn_logit_softcapping", 50.0),
        "logit_softcap": reading.number("final_logit_softcapping", 30.0),
        "embedding_scale": math.sqrt(fields["hidden"]),
        "branch_norms": "both",
        "zero_centered_norms": True,
    }


def _write(shape: Shape) -> Config:
    return {
        **write_llama(shape),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": shape.window,
        "layer_types": _kinds(shape.layers, 2),
        "query_pre_attn_scalar": round((shape.attention_scale or 1.0) ** -2),
        "attn_logit_softcapping": shape.attention_softcap,
        "final_logit_softcapping": shape.logit_softcap,
    }


NAMES = TensorNames(
    modules=LLAMA_NAMES.modules,
    block=LLAMA_NAMES.block,
    block_modules={
        **LLAMA_NAMES.block_modules,
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)


def _whole_width(shape: Shape) -> tuple[float, ...]:
    """The factor of scores that is the inverse root of an integer, as configurations say it."""
    scale = shape.attention_scale
    return () if scale is None else (float(max(1, round(scale**-2))) ** -0.5,)


STYLE: dict[str, Legal] = {
    **LLAMA_STYLE,
    "mlp": ("geglu",),
    "biases": ("none",),
    "window": (ANY,),
    "full_attention_every": (2,),
    "attention_scale": _whole_width,
    "attention_softcap": (None, ANY),
    "logit_softcap": (None, ANY),
    "embedding_scale": lambda shape: (math.sqrt(shape.hidden),),
    "branch_norms": ("both",),
    "zero_centered_norms": (True,),
}
GEMMA2 = Family("gemma2", "Gemma2", _gemma2, _write, NAMES, STYLE)
