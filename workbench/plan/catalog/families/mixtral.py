"""Mixtral: Mistral with routed experts."""

from __future__ import annotations

from workbench.plan.catalog.families.common_keys import own_window
from workbench.plan.catalog.families.family import ANY, Config, Family, Fields
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.families.stored_parts import PerExpert, TensorNames
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape


def _mixtral(reading: Reading) -> Fields:
    moe = {
        "experts": reading.whole("num_local_experts", 8),
        "top_k": reading.whole("num_experts_per_tok", 2),
        "ffn": reading.whole("intermediate_size"),
        "renormalise": True,
    }
    usual = {"kv_heads": 8, "positions": 131072, "epsilon": 1e-5, "theta": 1e6}
    return {**read_llama(reading, **usual, window=own_window(reading)), "moe": moe}


def _write(shape: Shape) -> Config:
    moe = shape.moe
    assert moe is not None
    return {
        **write_llama(shape),
        "intermediate_size": moe.ffn,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.auxiliary_loss,
        "sliding_window": shape.window,
    }


NAMES = TensorNames(
    modules=LLAMA_NAMES.modules,
    block=LLAMA_NAMES.block,
    block_modules={
        **LLAMA_NAMES.block_modules,
        "mlp.route": "block_sparse_moe.gate",
        "mlp.experts.gate": PerExpert("block_sparse_moe.experts.{}.w1"),
        "mlp.experts.up": PerExpert("block_sparse_moe.experts.{}.w3"),
        "mlp.experts.down": PerExpert("block_sparse_moe.experts.{}.w2"),
    },
)
STYLE = {
    **LLAMA_STYLE,
    "moe": (ANY,),
    "moe.shared": (0,),
    "moe.first_dense": (0,),
    "moe.renormalise": (True,),
    "moe.capacity": (None,),
    "window": (None, ANY),
    "biases": ("none",),
}
MIXTRAL = Family("mixtral", "Mixtral", _mixtral, _write, NAMES, STYLE)
