"""OLMo 2 (2501.00656): norms at the output of branches, and of all query and of all key heads."""

from __future__ import annotations

from dataclasses import replace

from workbench.plan.catalog.families.family import Family, Fields, Legal
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.huggingface_keys import Reading


def _read(reading: Reading) -> Fields:
    fields = read_llama(reading, epsilon=1e-5)
    return fields | {"branch_norms": "output", "qk_norm": "width"}


NAMES = replace(
    LLAMA_NAMES,
    block_modules={
        **{
            name: stored
            for name, stored in LLAMA_NAMES.block_modules.items()
            if name not in ("attention_norm", "mlp_norm")
        },
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
STYLE: dict[str, Legal] = {
    **LLAMA_STYLE,
    "biases": ("none",),
    "branch_norms": ("output",),
    "qk_norm": ("width",),
}
OLMO2 = Family("olmo2", "Olmo2", _read, write_llama, NAMES, STYLE)
