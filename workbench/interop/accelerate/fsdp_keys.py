"""Which keys an accelerate YAML with FSDP may hold, why a plan leaves some out, and which fields it
cannot say.
"""

from __future__ import annotations

from workbench.interop.foreign_keys import key_names

SHARDING = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
"""Sharding strategy of the first version -> (ZeRO stage, whether a node shards and nodes
replicate).
"""

_NAMES = key_names("accelerate")
PLUGINS = _NAMES["plugins"]
"""Sections that say how the states or the model are split."""
OPEN = _NAMES["open"]
"""Sections of other matters: whatever stands in them is known, and reported as not translated."""
KNOWN = frozenset(
    {
        *_NAMES["others"],
        *_NAMES["launch"],
        *(f"deepspeed_config.{key}" for key in _NAMES["deepspeed"]),
        *(f"fsdp_config.fsdp_{key}" for key in _NAMES["fsdp"]),
        *(f"parallelism_config.parallelism_config_{key}" for key in _NAMES["axes"]),
    }
)

WHYS = {
    **dict.fromkeys(_NAMES["launch"], "how it is launched; a plan's launcher decides"),
    "fsdp_config": "a detail of FSDP's own wrapping that a plan does not set",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "the layer, which is the unit that an "
    "estimate gathers",
    "fsdp_config.fsdp_limit_all_gathers": "false: all-gathers run ahead without a limit, each with "
    "a unit in memory; an estimate takes two units",
    "fsdp_config.fsdp_forward_prefetch": "true: one more unit is gathered ahead in forward: + 2 "
    "bytes x its parameters, 4 in fp32",
    "fsdp_config.fsdp_use_orig_params": "which tensors the optimizer sees of a unit; the same "
    "memory and time",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "at the start: true: rank 0 alone reads the "
    "weights; false: each rank of a node holds the whole model in host memory",
    "fsdp_config.fsdp_sync_module_states": "at the start: rank 0 sends its weights to the others",
    "fsdp_config.fsdp_state_dict_type": "how checkpoints are saved; FULL_STATE_DICT gathers the "
    "whole model in the host memory of rank 0",
    "fsdp_config.fsdp_ignored_modules": "modules that are not sharded: each rank holds their "
    "parameters, gradients and optimizer states",
    "deepspeed_config.zero3_init_flag": "at the start: false: each rank builds the whole model "
    "before it is sharded",
    "deepspeed_config.zero3_save_16bit_model": "a saved model is gathered in 16 bits, in the host "
    "memory of rank 0",
    "fsdp_config.fsdp_activation_checkpointing_offload": "strategy.offload_activations says "
    "it, for stack workbench only",
    "deepspeed_config": "a detail of how DeepSpeed is started or saves that a plan does not set",
    "dynamo_config": "strategy.kernels says compiled in one word",
    "kt_config": "off; on, KTransformers computes experts on the CPU",
    "fp8_config": "strategy.precision says fp8 in one word",
    "parallelism_config.parallelism_config_cp_comm_strategy": "a plan's ring passes keys and "
    "values along",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

LOST = {
    "model": "the model is the user's code",
    "strategy.data.zero": "FSDP shards all (stage 3), all but the parameters in use (2), or "
    "nothing (0)",
    "strategy.data.shard": "FSDP shards over all ranks, over a node, or over dp_shard_size ranks",
    "strategy.data.offload": "FSDP offloads parameters, gradients and optimizer together, where "
    "it shards",
    "strategy.data": "FSDP's file has no word for it",
    "strategy.tensor": "accelerate's tensor parallelism has a size only",
    "strategy.pipeline": "accelerate's FSDP runs no pipeline",
    "strategy.context.algorithm": "accelerate's context parallelism is a ring",
    "strategy.expert": "accelerate's FSDP spreads no experts",
    "strategy.recompute": "FSDP recomputes every wrapped layer, or none",
    "strategy.precision": "accelerate knows no (fp32), fp16, bf16 and fp8",
    "strategy.gradient_dtype": "accelerate reduces gradients as it computes",
    "strategy.attention": "attention under accelerate is as its framework profile says",
    "strategy.kernels": "accelerate runs the user's model eagerly or compiled (dynamo)",
    "training": "the user's script decides",
    "checkpoint": "the user's script decides",
    "telemetry": "the user's script decides",
    "corpus": "the user's script decides",
}
"""Field, or beginning of fields -> why an FSDP accelerate YAML does not say it."""
