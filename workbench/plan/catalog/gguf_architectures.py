"""What the architectures of GGUF files differ in: fields of the shape, and what tensors are called.

Names: `gguf.get_tensor_name_map`; metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.plan.catalog.families.bloom import BLOOM_STYLE
from workbench.plan.catalog.families.family import ANY, Legal
from workbench.plan.catalog.families.gpt2 import GPT2_STYLE
from workbench.plan.catalog.families.llama import LLAMA_STYLE
from workbench.plan.catalog.families.stored_parts import FusedRows, Stored, TensorNames

BLOCK: dict[str, str | Stored] = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.route": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
"""Module of blocks.N -> module of blk.N."""
FUSED_ATTENTION: dict[str, str | Stored] = {
    "attention.q": FusedRows("attn_qkv", lambda shape: 0),
    "attention.k": FusedRows("attn_qkv", lambda shape: shape.q_width),
    "attention.v": FusedRows("attn_qkv", lambda shape: shape.q_width + shape.kv_width),
}


def _names(block: Mapping[str, str | Stored]) -> TensorNames:
    modules = {
        "embedding.tokens": "token_embd",
        "embedding.positions": "position_embd",
        "embedding.norm": "token_embd_norm",
        "final_norm": "output_norm",
        "head": "output",
    }
    ignored = r"rope_freqs\.weight|attn_rot_embd"
    return TensorNames(modules, "blk.{}", {**BLOCK, **block}, ignored)


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture.

    Attributes:
        fields: Fields of a shape that every model of it has.
        expresses: As a family's; None: files are only read.
        names: Of its tensors.
        permuted: Whether rows of queries and keys are stored with rotary pairs adjacent.
    """

    fields: Mapping[str, Any]
    expresses: Mapping[str, Legal] | None
    names: TensorNames
    permuted: bool = False


_ROTARY: dict[str, Legal] = {
    **LLAMA_STYLE,
    "mlp": ("swiglu",),
    "biases": ("none",),
    "rope_scaling.type": (None, "linear", "yarn", "llama3"),
    "rope_scaling.attention_factor": (None,),
    "rope_scaling.truncate": (None,),
}
_EXPERTS: dict[str, Legal] = {
    "moe.shared": (0, None),
    "moe.first_dense": (0, None),
    "moe.renormalise": (True, None),
    "moe.scores": ("softmax", None),
    "moe.groups": (None,),
    "moe.score_bias": (False, None),
    "moe.scale": (1.0, None),
    "moe.capacity": (None,),
}
"""llama.cpp's own gates of these architectures add up to one."""
_GELU = {"norm": "layernorm", "mlp": "gelu", "biases": "all"}
_PLAIN = _names({})
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture({}, {**_ROTARY, "moe": (None, ANY), **_EXPERTS}, _PLAIN, permuted=True),
    "qwen2": Architecture({"biases": "qkv"}, {**_ROTARY, "biases": ("qkv",)}, _PLAIN),
    "qwen3": Architecture({"qk_norm": "head"}, {**_ROTARY, "qk_norm": ("head",)}, _PLAIN),
    "qwen3moe": Architecture(
        {"qk_norm": "head"}, {**_ROTARY, "qk_norm": ("head",), "moe": (ANY,), **_EXPERTS}, _PLAIN
    ),
    "phi3": Architecture(
        {},
        None,  # a Llama otherwise: llama.cpp does not apply its window
        _names(
            {
                **FUSED_ATTENTION,
                "mlp.gate": FusedRows("ffn_up", lambda shape: 0),
                "mlp.up": FusedRows("ffn_up", lambda shape: shape.ffn),
            }
        ),
    ),
    "gpt2": Architecture(
        {"positions": "learned", **_GELU},
        {**GPT2_STYLE, "mlp": ("gelu",)},  # llama.cpp computes the tanh approximation
        _names(FUSED_ATTENTION),
    ),
    "bloom": Architecture(
        {"positions": "alibi", "embedding_norm": True, **_GELU},
        BLOOM_STYLE,
        _names(FUSED_ATTENTION),
    ),
}
"""Value of general.architecture -> what it means. Mistral's and Mixtral's is llama too."""
