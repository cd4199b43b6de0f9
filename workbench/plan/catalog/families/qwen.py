"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.huggingface_keys import Reading


def _qwen2(reading: Reading) -> Fields:
    """Qwen2: biases on query, key and value; a window only where it is turned on, from
    `max_window_layers` on.
    """
    fields = {**read_llama(reading, kv_heads=32, positions=32768), "biases": "qkv"}
    full = reading.whole("max_window_layers", 28, least=0)
    if not reading.flag("use_sliding_window", False) or full >= fields["layers"]:
        reading.not_modelled.pop("layer_types", None)
        return fields | {"window": None}
    if fields["window"] is not None and full:
        reading.lacks(
            "max_window_layers", f"max_window_layers {full}: that many layers attend to all"
        )
    return fields


QWEN2 = Family(
    "qwen2", "Qwen2", _qwen2, write_llama, LLAMA_NAMES, {**LLAMA_STYLE, "biases": ("qkv",)}
)
