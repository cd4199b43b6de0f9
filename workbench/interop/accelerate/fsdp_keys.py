"""Which keys an accelerate YAML with FSDP may hold, why a plan leaves some out, and which fields it
cannot say.

Names are those of `accelerate launch --help` and
https://huggingface.co/docs/accelerate/usage_guides/fsdp.
"""

from __future__ import annotations

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

_LAUNCH = (
    "compute_environment",
    "debug",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "enable_cpu_affinity",
    "downcast_bf16",
    "use_cpu",
    "tpu_env",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "command_file",
    "commands",
    "num_cpu_threads_per_process",
    "mpirun_config",
    "ipex_config",
    "rdzv_conf",
    "use_mps_device",
)
_FSDP = (
    "version",
    "sharding_strategy",
    "reshard_after_forward",
    "offload_params",
    "activation_checkpointing",
    "backward_prefetch",
    "backward_prefetch_policy",
    "limit_all_gathers",
    "forward_prefetch",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "state_dict_type",
    "use_orig_params",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "ignored_modules",
    "activation_checkpointing_offload",
)
_AXES = (
    "dp_replicate_size",
    "dp_shard_size",
    "tp_size",
    "cp_size",
    "cp_backend",
    "cp_comm_strategy",
    "sp_size",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
)
_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_config_file",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "enable_msamp",
    "msamp_opt_level",
)
PLUGINS = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
"""Sections that say how the states or the model are split."""
KNOWN = frozenset(
    {
        "fp16",
        "dynamo_backend",
        *(f"deepspeed_config.{key}" for key in _DEEPSPEED),
        *_LAUNCH,
        "distributed_type",
        "num_processes",
        "num_machines",
        "mixed_precision",
        "fsdp_config",
        "parallelism_config",
        "dynamo_config",
        "deepspeed_config",
        "megatron_lm_config",
        "fp8_config",
        *(f"fsdp_config.fsdp_{key}" for key in _FSDP),
        *(f"parallelism_config.parallelism_config_{key}" for key in _AXES),
    }
)
OPEN = (
    "dynamo_config",
    "fp8_config",
    "mpirun_config",
    "ipex_config",
    "megatron_lm_config",
    "tpu_env",
    "commands",
)
"""Sections of other matters: whatever stands in them is known, and reported as not translated."""

WHYS = {
    **dict.fromkeys(_LAUNCH, "how it is launched; a plan's launcher decides"),
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
