"""GPT-2."""

from __future__ import annotations

from workbench.plan.catalog.families.common_keys import ACTIVATIONS, activation
from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading


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


GPT2 = Family("gpt2", "GPT2", _gpt2)
