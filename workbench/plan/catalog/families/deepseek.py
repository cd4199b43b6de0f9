"""DeepSeek-V2 and V3."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.plan.catalog.families.family import Family, Fields
from workbench.plan.catalog.families.llama import read_llama
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading


def _deepseek(reading: Reading) -> Fields:
    """DeepSeek-V2 and V3: latent attention, fine-grained experts beside shared ones, leading dense
    layers.
    """
    if (every := reading.whole("moe_layer_freq", 1)) != 1:
        raise refuse("model", f"moe_layer_freq is {every}; legal here: 1")
    third = reading.config.get("model_type") == "deepseek_v3"
    moe = {
        "experts": reading.whole("n_routed_experts"),
        "top_k": reading.whole("num_experts_per_tok"),
        "ffn": reading.whole("moe_intermediate_size"),
        "shared": reading.whole("n_shared_experts", 0, least=0),
        "first_dense": reading.whole("first_k_dense_replace", 0, least=0),
        "renormalise": reading.flag("norm_topk_prob", third),
    }
    mla = {
        "kv_rank": reading.whole("kv_lora_rank"),
        "q_rank": reading.whole("q_lora_rank", None),
        "rope_dim": reading.whole("qk_rope_head_dim"),
        "nope_dim": reading.whole("qk_nope_head_dim"),
        "value_dim": reading.whole("v_head_dim"),
    }
    reading.whole("topk_group", None)
    fields = {
        **read_llama(reading, scaled=False),
        "kv_heads": None,
        "head_dim": None,
        "moe": moe,
        "mla": mla,
    }
    further = reading.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS)
    return fields | {"layers": fields["layers"] + further, "mtp_layers": further or None}


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2", _deepseek, published=True)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3", _deepseek, published=True)
