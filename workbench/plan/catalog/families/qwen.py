"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; Qwen3: with norms of heads in their
place.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.errors import refuse
from workbench.plan.catalog.families.common_keys import FULL, SLIDING, layer_kinds, own_window
from workbench.plan.catalog.families.family import ANY, Config, Family, Fields, Legal
from workbench.plan.catalog.families.llama import (
    LLAMA_NAMES,
    LLAMA_STYLE,
    read_layers,
    read_llama,
    write_llama,
)
from workbench.plan.catalog.families.stored_parts import PerExpert
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown


def _window(reading: Reading) -> int | None:
    """A window only where it is turned on."""
    window = own_window(reading, 4096)
    return window if reading.flag("use_sliding_window", False) else None


def _qwen2(reading: Reading) -> Fields:
    """Qwen2: biases on query, key and value; a window from `max_window_layers` on."""
    window, layers = _window(reading), read_layers(reading)
    full = reading.whole("max_window_layers", 28, least=0)
    kinds = [FULL if window is None or i < full else SLIDING for i in range(layers)]
    usual = {"kv_heads": 32, "positions": 32768, "window": window, "kinds": kinds}
    return {**read_llama(reading, **usual), "biases": "qkv"}


def _qwen3(reading: Reading) -> Fields:
    """Qwen3: queries' and keys' heads are normed before they are rotated."""
    return _normed(reading, _qwen2(reading))


def _normed(reading: Reading, fields: Fields) -> Fields:
    # Its configuration class has a width of its own, whatever hidden_size / heads is.
    width = fields["head_dim"] or 128
    biased = "none" if not reading.flag("attention_bias", False) else "qkv"
    return {**fields, "biases": biased, "qk_norm": "head", "head_dim": width}


def _qwen3_moe(reading: Reading) -> Fields:
    """Qwen3's mixture: routed experts in every layer; the window is of all layers."""
    if (every := reading.whole("decoder_sparse_step", 1)) != 1:
        raise refuse("model", f"decoder_sparse_step is {every}; legal here: 1")
    if dense := reading.get("mlp_only_layers", []):
        reading.lacks("mlp_only_layers", f"mlp_only_layers {shown(dense)}")
    # transformers 5 writes the second spelling.
    moe = {
        "experts": reading.whole("num_experts", reading.whole("num_local_experts", 128)),
        "top_k": reading.whole("num_experts_per_tok", 8),
        "ffn": reading.whole("moe_intermediate_size", 768),
        "renormalise": reading.flag("norm_topk_prob", False),
    }
    fields = read_llama(reading, kv_heads=4, positions=32768, window=_window(reading))
    return {**_normed(reading, fields), "moe": moe}


def _write_qwen2(shape: Shape) -> Config:
    """Configuration, with the keys of a window where there is one."""
    windows = {
        "use_sliding_window": True,
        "sliding_window": shape.window,
        "max_window_layers": 0,
        "layer_types": layer_kinds(shape),
    }
    return {**write_llama(shape), **(windows if shape.window else {})}


def _write_qwen3(shape: Shape) -> Config:
    return {**_write_qwen2(shape), "attention_bias": False}


def _write_qwen3_moe(shape: Shape) -> Config:
    moe = shape.moe
    assert moe is not None
    return {
        **_write_qwen3(shape),
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.renormalise,
        "router_aux_loss_coef": moe.auxiliary_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


NORMED = {
    **LLAMA_NAMES.block_modules,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
QWEN3_NAMES = replace(LLAMA_NAMES, block_modules=NORMED)
QWEN3_MOE_NAMES = replace(
    LLAMA_NAMES,
    block_modules={
        **NORMED,
        "mlp.route": "mlp.gate",
        "mlp.experts.gate": PerExpert("mlp.experts.{}.gate_proj"),
        "mlp.experts.up": PerExpert("mlp.experts.{}.up_proj"),
        "mlp.experts.down": PerExpert("mlp.experts.{}.down_proj"),
    },
)
QWEN2_STYLE: dict[str, Legal] = {
    **LLAMA_STYLE,
    "biases": ("qkv",),
    "window": (None, ANY),
    "full_attention_every": (None, ANY),
}
QWEN3_STYLE: dict[str, Legal] = {**QWEN2_STYLE, "qk_norm": ("head",), "biases": ("none",)}
QWEN3_MOE_STYLE: dict[str, Legal] = {
    **QWEN3_STYLE,
    "full_attention_every": (None,),
    "moe": (ANY,),
    "moe.shared": (0,),
    "moe.first_dense": (0,),
    "moe.capacity": (None,),
}
QWEN2 = Family("qwen2", "Qwen2", _qwen2, _write_qwen2, LLAMA_NAMES, QWEN2_STYLE)
QWEN3 = Family("qwen3", "Qwen3", _qwen3, _write_qwen3, QWEN3_NAMES, QWEN3_STYLE)
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3Moe", _qwen3_moe, _write_qwen3_moe, QWEN3_MOE_NAMES, QWEN3_MOE_STYLE
)
