"""Phi-3, and Phi-4, which calls itself so: Llama with fused projections."""

from __future__ import annotations

from workbench.plan.catalog.families.family import ANY, Config, Family, Fields
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.families.stored_parts import FusedRows, TensorNames
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape


def _read(reading: Reading) -> Fields:
    share = reading.number("partial_rotary_factor", 1.0)
    reading.whole("original_max_position_embeddings", None)
    return read_llama(reading, positions=4096, epsilon=1e-5, share=share)


def _write(shape: Shape) -> Config:
    pad = {"pad_token_id": None}
    share = shape.rotated_width / int(shape.head_dim or 1)
    own = {"sliding_window": shape.window, "partial_rotary_factor": share}
    return {**write_llama(shape), **own, **pad}


NAMES = TensorNames(
    modules=LLAMA_NAMES.modules,
    block=LLAMA_NAMES.block,
    block_modules={
        **LLAMA_NAMES.block_modules,
        "attention.q": FusedRows("self_attn.qkv_proj", lambda shape: 0),
        "attention.k": FusedRows("self_attn.qkv_proj", lambda shape: shape.q_width),
        "attention.v": FusedRows(
            "self_attn.qkv_proj", lambda shape: shape.q_width + shape.kv_width
        ),
        "mlp.gate": FusedRows("mlp.gate_up_proj", lambda shape: 0),
        "mlp.up": FusedRows("mlp.gate_up_proj", lambda shape: shape.ffn),
    },
)
STYLE = {**LLAMA_STYLE, "window": (None, ANY), "biases": ("none",), "rotary_dim": (None, ANY)}
PHI3 = Family("phi3", "Phi3", _read, _write, NAMES, STYLE)
"""A model that Llama expresses too is written as Llama."""
