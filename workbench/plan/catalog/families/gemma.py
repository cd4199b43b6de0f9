"""Gemma 2 (2408.00118): norms at both ends of a branch, which multiply by 1 + weight; scaled
embeddings; soft-caps; windows in every second layer. Gemma 3 (2503.19786): norms of heads in place
of soft-caps; five layers of six with a window, and rotary frequencies of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from workbench.plan.catalog.families.common_keys import (
    FULL,
    GATED,
    SLIDING,
    kinds_of,
    layer_kinds,
    own_window,
)
from workbench.plan.catalog.families.family import ANY, Config, Family, Fields, Legal
from workbench.plan.catalog.families.llama import (
    LLAMA_NAMES,
    LLAMA_STYLE,
    read_layers,
    read_llama,
    write_llama,
)
from workbench.plan.catalog.families.rotary_keys import write_rotary
from workbench.plan.catalog.families.stored_parts import TensorNames
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown

USUAL_WINDOW = 4096
"""transformers wants one, whether or not a layer has it."""


def _gemma2(reading: Reading) -> Fields:
    return _gemma(reading, 8192, every=2, cap=50.0, logit_cap=30.0)


def _gemma3(reading: Reading) -> Fields:
    every = reading.whole("sliding_window_pattern", 6)
    fields = _gemma(reading, 131072, every, of_kind=FULL)
    inner = reading.section("rope_parameters").get(SLIDING)
    local = inner.get("rope_theta") if isinstance(inner, dict) else None
    if isinstance(inner, dict) and inner.get("rope_type", "default") != "default":
        what = f"rope_parameters of {SLIDING} of type {shown(inner['rope_type'])}"
        reading.lacks("rope_parameters", what)
    beside = reading.number("rope_local_base_freq", 10000.0)
    theta = float(beside or 10000.0) if local is None else local
    return fields | {"qk_norm": "head", "window_rope_theta": theta if fields["window"] else None}


def _gemma(
    reading: Reading,
    positions: int,
    every: int,
    cap: float | None = None,
    logit_cap: float | None = None,
    of_kind: str | None = None,
) -> Fields:
    theta = 10000.0 if of_kind is None else 1e6
    fields = read_llama(
        reading,
        kv_heads=4,
        positions=positions,
        theta=theta,
        of_kind=of_kind,
        activation=("hidden_activation", GATED, "gelu_pytorch_tanh"),
        window=own_window(reading, USUAL_WINDOW),
        kinds=kinds_of(read_layers(reading), every),
    )
    score_width = reading.number("query_pre_attn_scalar", 256)
    return fields | {
        "head_dim": fields["head_dim"] or 256,
        "tied": reading.flag("tie_word_embeddings", True),
        "attention_scale": float(score_width or 256) ** -0.5,
        "attention_softcap": _soft_cap(reading, "attn_logit_softcapping", cap),
        "logit_softcap": _soft_cap(reading, "final_logit_softcapping", logit_cap),
        "embedding_scale": math.sqrt(fields["hidden"]),
        "branch_norms": "both",
        "zero_centered_norms": True,
    }


def _soft_cap(reading: Reading, key: str, usual: float | None) -> float | None:
    return reading.number(key, reading.unless_null(key, usual))


def _write(shape: Shape) -> Config:
    return {
        **write_llama(shape),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": shape.window or USUAL_WINDOW,
        "layer_types": layer_kinds(shape),
        "query_pre_attn_scalar": round((shape.attention_scale or 1.0) ** -2),
        "attn_logit_softcapping": shape.attention_softcap,
        "final_logit_softcapping": shape.logit_softcap,
    }


def _write_gemma3(shape: Shape) -> Config:
    full = write_rotary(shape)["rope_parameters"]
    written = {key: value for key, value in _write(shape).items() if key != "rope_scaling"}
    if (theta := shape.window_rope_theta) is None:
        return {**written, "rope_parameters": {FULL: full}}
    local = {"rope_type": "default", "rope_theta": theta}
    every = shape.full_attention_every
    return {
        **written,
        "rope_parameters": {FULL: full, SLIDING: local},
        "rope_local_base_freq": theta,
        **({"sliding_window_pattern": every} if every else {}),
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
    "window": (None, ANY),
    "full_attention_every": (None, ANY),
    "attention_scale": _whole_width,
    "attention_softcap": (None, ANY),
    "logit_softcap": (None, ANY),
    "embedding_scale": lambda shape: (math.sqrt(shape.hidden),),
    "branch_norms": ("both",),
    "zero_centered_norms": (True,),
}
STYLE3: dict[str, Legal] = {
    **STYLE,
    "qk_norm": ("head",),
    "window_rope_theta": lambda shape: (ANY,) if shape.window else (None,),
}
NAMES3 = replace(
    NAMES,
    block_modules={
        **NAMES.block_modules,
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
)
GEMMA3 = Family("gemma3_text", "Gemma3", _gemma3, _write_gemma3, NAMES3, STYLE3)
GEMMA2 = Family("gemma2", "Gemma2", _gemma2, _write, NAMES, STYLE)
