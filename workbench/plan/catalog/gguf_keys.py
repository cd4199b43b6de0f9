"""Metadata keys of GGUF files that no field of a shape says."""

from __future__ import annotations

from typing import Any

KIND = "general.architecture"
SPLIT = "split.count"
"""Files that a model is split over."""
ELSEWHERE = ("tokenizer.", "GGUF.")
"""Begin of the tokenizer's keys, and of what the package `gguf` says of the header."""
IGNORED = (
    ("general.", "it describes the file"),
    ("quantize.", "it describes the file"),
    ("split.", "it describes the file"),
)
"""Begin of keys -> why a shape need not say them."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_scale": (0.0,),
    "attention.temperature_length": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window_pattern": (),
    "attention.shared_kv_layers": (0,),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
}
"""Key of an architecture -> values with which the model computes what its shape says, as llama.cpp
takes them; any other is reported as not modelled.
"""
BLOOM_NEUTRAL: dict[str, tuple[Any, ...]] = {"attention.max_alibi_bias": (8.0,)}
"""Values of ALiBi, likewise."""
