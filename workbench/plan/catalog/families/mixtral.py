"""Mixtral: Mistral with routed experts."""

from __future__ import annotations

from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.families.llama import read_llama
from workbench.plan.catalog.huggingface_keys import Reading


def _mixtral(reading: Reading) -> Fields:
    moe = {
        "experts": reading.whole("num_local_experts", 8),
        "top_k": reading.whole("num_experts_per_tok", 2),
        "ffn": reading.whole("intermediate_size"),
    }
    return {
        **read_llama(reading, kv_heads=8, positions=131072, epsilon=1e-5, theta=1e6),
        "moe": moe,
    }


MIXTRAL = Family("mixtral", "Mixtral", _mixtral)
