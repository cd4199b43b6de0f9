"""DeepSeek-V2 and V3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import refuse
from workbench.plan.catalog.families.family import ANY, Config, Family, Fields, Legal
from workbench.plan.catalog.families.llama import LLAMA_NAMES, LLAMA_STYLE, read_llama, write_llama
from workbench.plan.catalog.families.stored_parts import Alone, PerExpert, StoredPart
from workbench.plan.catalog.huggingface_keys import MOST_LAYERS, Reading
from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown


def _deepseek(
    reading: Reading, shared: int, dense: int, scale: float, positions: int = 2048
) -> Fields:
    """Latent attention, fine-grained experts beside shared ones, leading dense layers; with what
    transformers' class of the family has of each where its key is absent.
    """
    if (every := reading.whole("moe_layer_freq", 1)) != 1:
        raise refuse("model", f"moe_layer_freq is {every}; legal here: 1")
    moe = {
        "experts": reading.whole("n_routed_experts"),
        "top_k": reading.whole("num_experts_per_tok"),
        "ffn": reading.whole("moe_intermediate_size"),
        "shared": reading.whole(
            "n_shared_experts", reading.unless_null("n_shared_experts", shared) or 0, least=0
        ),
        "first_dense": reading.whole("first_k_dense_replace", dense, least=0),
        "scale": reading.number("routed_scaling_factor", scale),
    }
    mla = {
        "kv_rank": reading.whole("kv_lora_rank"),
        "q_rank": reading.whole("q_lora_rank", reading.unless_null("q_lora_rank", 1536)),
        "rope_dim": reading.whole("qk_rope_head_dim"),
        "nope_dim": reading.whole("qk_nope_head_dim"),
        "value_dim": reading.whole("v_head_dim"),
    }
    llama = read_llama(reading, positions=positions)
    fields = {**llama, "kv_heads": None, "head_dim": None, "moe": moe, "mla": mla}
    if scaling := fields["rope_scaling"]:
        said = reading.section("rope_parameters") or reading.section("rope_scaling")
        scaling |= {"mscale_all_dim": said.get("mscale_all_dim") or None}
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if reading.whole(key, 0, least=0, most=MOST_LAYERS):
            first = f"model.layers.{fields['layers']}"
            reading.leave_out(key, f"layers that predict further tokens, {first} on, are left out")
    return fields


def _v2(reading: Reading) -> Fields:
    """Softmax scores, of the best groups where `topk_method` says so."""
    fields = _deepseek(reading, shared=2, dense=0, scale=1.0)
    method = reading.get("topk_method", "greedy")
    groups = reading.whole("n_group", None), reading.whole("topk_group", None)
    if method == "group_limited_greedy" and None not in groups:
        fields["moe"] |= {"groups": groups[0], "top_groups": groups[1]}
    elif method != "greedy":
        reading.lacks("topk_method", f"topk_method {shown(method)}")
    if reading.get("scoring_func", "softmax") != "softmax":
        reading.lacks("scoring_func", f"scoring_func {shown(reading.get('scoring_func'))}")
    # Its authors' code divides by the gates' sum in place of scaling, transformers' does neither.
    if reading.flag("norm_topk_prob", False):
        reading.lacks("norm_topk_prob", "norm_topk_prob true")
    fields["moe"]["renormalise"] = False
    return fields


def _v3(reading: Reading) -> Fields:
    """Sigmoid scores, and a bias by which experts are chosen; always by groups."""
    fields = _deepseek(reading, shared=1, dense=3, scale=2.5, positions=4096)
    for key, legal in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if (value := reading.get(key, legal)) != legal:
            reading.lacks(key, f"{key} {shown(value)}")
    if not reading.flag("rope_interleave", True):
        reading.lacks("rope_interleave", "rope_interleave false")
    return fields | {
        "moe": fields["moe"]
        | {
            "renormalise": reading.flag("norm_topk_prob", True),
            "scores": "sigmoid",
            "score_bias": True,
            **_groups(reading.whole("n_group", 8), reading.whole("topk_group", 4)),
        }
    }


def _groups(count: int, best: int) -> Fields:
    """A single group, from which all experts come, is none (Kimi K2, Moonlight)."""
    return {} if count == best == 1 else {"groups": count, "top_groups": best}


def _write(shape: Shape) -> Config:
    moe, mla = shape.moe, shape.mla
    assert moe is not None and mla is not None
    return {
        **write_llama(shape),
        "num_key_value_heads": shape.heads,
        "head_dim": mla.rope_dim,
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank,
        "qk_rope_head_dim": mla.rope_dim,
        "qk_nope_head_dim": mla.nope_dim,
        "v_head_dim": mla.value_dim,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scale,
        "aux_loss_alpha": moe.auxiliary_loss,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write_v2(shape: Shape) -> Config:
    moe = shape.moe
    assert moe is not None
    method = "group_limited_greedy" if moe.groups else "greedy"
    choice = {"n_group": moe.groups, "topk_group": moe.top_groups, "topk_method": method}
    return {**_write(shape), **choice, "scoring_func": "softmax"}


def _write_v3(shape: Shape) -> Config:
    moe = shape.moe
    assert moe is not None
    groups = {"n_group": moe.groups or 1, "topk_group": moe.top_groups or 1}
    choice = {**groups, "topk_method": "noaux_tc"}
    return {**_write(shape), **choice, "scoring_func": "sigmoid", "rope_interleave": True}


@dataclass(frozen=True)
class Query:
    """Queries' projection, which has another name where it reads a latent."""

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        assert shape.mla is not None
        name = "q_b_proj" if shape.mla.q_rank else "q_proj"
        return Alone(f"self_attn.{name}").parts(leaf, extent, shape)


@dataclass(frozen=True)
class RouterOfBias:
    """A router whose bias has a name of its own."""

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        name = "e_score_correction_bias" if leaf == "bias" else leaf
        return Alone("mlp.gate").parts(name, extent, shape)


NAMES = replace(
    LLAMA_NAMES,
    block_modules={
        **LLAMA_NAMES.block_modules,
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_down_norm": "self_attn.q_a_layernorm",
        "attention.q": Query(),
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_down_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "mlp.route": RouterOfBias(),
        "mlp.experts.gate": PerExpert("mlp.experts.{}.gate_proj"),
        "mlp.experts.up": PerExpert("mlp.experts.{}.up_proj"),
        "mlp.experts.down": PerExpert("mlp.experts.{}.down_proj"),
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
    },
)


def _one_or_more(shape: Shape) -> tuple[Any, ...]:
    shared = shape.moe.shared if shape.moe else 0
    return (shared or 1,)


STYLE: dict[str, Legal] = {
    **LLAMA_STYLE,
    "mla": (ANY,),
    "moe": (ANY,),
    "moe.shared": _one_or_more,
    "moe.capacity": (None,),
    "rope_scaling.mscale_all_dim": (None, ANY),
    "biases": ("none",),
}
V2_STYLE: dict[str, Legal] = {
    **STYLE,
    "moe.scores": ("softmax",),
    "moe.score_bias": (False,),
    "moe.renormalise": (False,),
}
V3_STYLE: dict[str, Legal] = {**STYLE, "moe.scores": ("sigmoid",), "moe.score_bias": (True,)}
DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2", _v2, _write_v2, NAMES, V2_STYLE, published=True)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3", _v3, _write_v3, NAMES, V3_STYLE, published=True)
