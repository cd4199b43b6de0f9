"""Which keys a ds_config.json may hold, why a plan leaves some of them out, and which fields of a
plan it cannot say.

Names are from https://www.deepspeed.ai/docs/config-json/ and the pages that it points to.
"""

from __future__ import annotations

MAPPINGS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "fp16",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "data_types",
    "tensor_parallel",
    "pipeline",
)
"""Keys that hold other keys."""
BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_parallel_size",
)
OPTIMIZERS = {
    name: name.lower()
    for name in (
        "Adam",
        "AdamW",
        "SGD",
        "Lamb",
        "Lion",
        "Muon",
        "Adagrad",
        "OneBitAdam",
        "OneBitLamb",
        "ZeroOneAdam",
        "FusedAdam",
        "MuSGD",
        "MuAdam",
        "MuAdamW",
    )
}
PLAN_OPTIMIZER = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}
DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
DEFAULTS: dict[str, tuple[str, float | None]] = {
    "lr": ("learning_rate", 1e-3),
    "eps": ("epsilon", 1e-8),
    "weight_decay": ("weight_decay", 0.0),
}
"""Parameter of the optimizer -> the plan's field, and the value where the file does not say."""
BETAS: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999},
    "sgd": {"beta1": 0.0},
}
"""A plan's optimizer -> its decay rates (SGD: momentum) where the file does not say: torch's and
DeepSpeed's.
"""
PEAK, WARMUP, END = 1e-3, 1000, 1e-4
"""DeepSpeed's defaults (runtime/lr_schedules.py): warmup_max_lr of WarmupDecayLR, warmup_num_steps,
cos_min_ratio.
"""

_OPTIMIZER = "training.optimizer."
AUTO: dict[str, tuple[str, ...]] = {
    "train_batch_size": ("training.global_batch",),
    "train_micro_batch_size_per_gpu": ("training.micro_batch",),
    "gradient_accumulation_steps": ("training.global_batch",),
    "gradient_clipping": (f"{_OPTIMIZER}clip",),
    "bf16.enabled": ("strategy.precision",),
    "fp16.enabled": ("strategy.precision",),
    "bf16": ("strategy.precision",),
    "fp16": ("strategy.precision",),
    "zero_optimization.reduce_bucket_size": ("strategy.data.bucket_mib",),
    "optimizer.params.lr": (f"{_OPTIMIZER}learning_rate",),
    "optimizer.params.eps": (f"{_OPTIMIZER}epsilon",),
    "optimizer.params.betas": (f"{_OPTIMIZER}beta1", f"{_OPTIMIZER}beta2"),
    "optimizer.params.weight_decay": (f"{_OPTIMIZER}weight_decay",),
    "scheduler.params.warmup_max_lr": (f"{_OPTIMIZER}learning_rate",),
    "scheduler.params.warmup_num_steps": (f"{_OPTIMIZER}warmup_steps",),
    "scheduler.params.total_num_steps": ("training.steps",),
}
"""Key -> fields whose default in the plan stands where the file says auto."""

_ZERO = (
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "mics_shard_size",
    "cpu_offload",
    "cpu_offload_params",
    "cpu_offload_use_pin_memory",
    "allgather_partitions",
    "allgather_bucket_size",
    "reduce_scatter",
    "contiguous_gradients",
    "load_from_fp32_weights",
    "round_robin_gradients",
    "parameter_alignment",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "legacy_stage1",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "mics_hierarchical_params_gather",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "compute_grad_norm",
    "use_multi_rank_bucket_allreduce",
    "model_persistence_threshold",
    "param_persistence_threshold",
    "save_muon_momentum_buffer_in_memory",
    "use_all_reduce_for_fetch_params",
    "max_live_parameters",
    "max_reuse_distance",
    "prefetch_bucket_size",
    "gather_16bit_weights_on_model_save",
)
_OFFLOAD = (
    "device",
    "nvme_path",
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
    "super_offload_max_grad_norm",
)
KNOWN = frozenset(
    {
        *BATCH,
        "optimizer.type",
        "optimizer.legacy_fusion",
        "scheduler.type",
        "gradient_clipping",
        "sequence_parallel_size",
        "tensor_parallel.autotp_size",
        "pipeline.stages",
        "pipeline.activation_checkpoint_interval",
        "data_types.grad_accum_dtype",
        "bf16.enabled",
        "fp16.enabled",
        "bf16.bf16_master_weights_and_grads",
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "tensorboard.enabled",
        "wandb.enabled",
        *(f"zero_optimization.{key}" for key in _ZERO),
        *(
            f"zero_optimization.offload_{part}.{key}"
            for part in ("param", "optimizer")
            for key in _OFFLOAD
        ),
    }
)
"""Dotted keys that are known one by one: those that are translated, and ZeRO's."""

_PINNED = "true: copies overlap, in host memory that cannot be swapped; a plan's always is"
_GATHERED = {
    "max_live_parameters": "so many elements are gathered at most, {size} of a rank; an estimate "
    "takes the framework profile's (1e9)",
    "max_reuse_distance": "what is used again within so many elements ({size}) stays gathered: "
    "more memory, fewer all-gathers",
    "prefetch_bucket_size": "so many elements are gathered ahead, {size} of a rank",
    "param_persistence_threshold": "parameters below so many elements ({size}) are never sharded",
    "model_persistence_threshold": "at most so many elements ({size}) are never sharded",
    "gather_16bit_weights_on_model_save": "a saved model is gathered in 16 bits, in the host "
    "memory of rank 0",
    "use_all_reduce_for_fetch_params": "parameters are fetched by all-reduce, twice the volume",
}
"""Setting of what ZeRO-3 has gathered -> what it changes."""
WHYS = {
    "zero_optimization": "a detail of DeepSpeed's own sharding that a plan does not set",
    "zero_optimization.zero_hpz_partition_size": "a plan keeps no second, smaller shard of the "
    "parameters (ZeRO++): + 2 bytes x parameters / {value} a rank, 4 in fp32, and backward "
    "gathers within it",
    "zero_optimization.allgather_bucket_size": "parameters are all-gathered after the step in "
    "buffers of {size} (stages 1 and 2), which an estimate does not count",
    "zero_optimization.reduce_scatter": "false: gradients are all-reduced, twice the volume",
    "zero_optimization.contiguous_gradients": "true: gradients wait in a buffer of a bucket, two "
    "with overlap; false: memory fragments",
    **{
        f"zero_optimization.{before}{key}": why
        for key, why in _GATHERED.items()
        for before in ("stage3_", "")
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _GATHERED[
        "gather_16bit_weights_on_model_save"
    ],
    "zero_optimization.sub_group_size": "the optimizer steps through groups of so many elements; "
    "of each, 16-bit gradients are made fp32: 2 x {size} beside them",
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_param.pin_memory": _PINNED,
    "zero_optimization.offload_param.max_in_cpu": "with NVMe so many elements stay in host memory, "
    "{size}",
    "zero_optimization.zero_quantized_weights": "a plan sends parameters as they are (ZeRO++ "
    "quantises them)",
    "zero_optimization.zero_quantized_gradients": "a plan sends gradients as they are (ZeRO++ "
    "quantises them)",
    "zero_optimization.offload_optimizer.ratio": "strategy.data.offload_ratio is of an optimizer "
    "that is offloaded without the parameters",
    "zero_optimization.offload_param": "a detail of how DeepSpeed copies what is offloaded",
    "zero_optimization.offload_optimizer": "a detail of how DeepSpeed copies what is offloaded",
    "seed": "training.seed is set by the script; DeepSpeed draws samples by it",
    "optimizer.params": "a plan's optimizer has no such setting",
    "scheduler.params": "a plan's learning-rate schedule has no such setting",
    "activation_checkpointing": "settings of a library that the model's code may call; they turn "
    "nothing on",
    "fp16": "a plan scales the loss by its own rule",
    "steps_per_print": "logging; a run keeps its own telemetry",
    "wall_clock_breakdown": "logging; a run keeps its own telemetry",
    "communication_data_type": "a plan reduces gradients in strategy.gradient_dtype",
    "fp32_allreduce": "a plan reduces gradients in strategy.gradient_dtype",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

SECTIONS = (
    "optimizer.params",
    "scheduler.params",
    "activation_checkpointing",
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "pipeline",
    "tensor_parallel",
    "data_types",
    "aio",
    "autotuning",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "elasticity",
    "compression_training",
    "data_efficiency",
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "sparse_attention",
    "checkpoint",
    "compile",
    "nebula",
    "hybrid_engine",
    "torch_autocast",
    "zenflow",
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
    "layer_reduction",
    "timers",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "disable_allgather",
    "communication_data_type",
    "fp32_allreduce",
    "seq_parallel_communication_data_type",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "use_data_before_expert_parallelism",
    "graph_harvesting",
    "dataloader_drop_last",
    "gradient_allreduce_op",
    "managed_gradient_accumulation",
    "use_node_local_storage",
    "load_universal_checkpoint",
    "allreduce_always_fp32",
    "gradient_noise_scale",
    "vocabulary_size",
    "nebula_config",
    "data_sampling",
    "data_routing",
    "monitor_config",
    "comms_config",
    "expert_parallel",
    "moe",
    "local_rank",
    "seed",
    "zero_optimization.zenflow",
    "zero_optimization.leaf_module",
)
"""Sections and keys of other matters: whatever stands in them is known, and reported as not
translated.
"""

LOST = {
    "model": "the model is the user's code",
    "strategy.pipeline": "the pipeline's schedule and partition are PipelineModule's, in the "
    "user's code",
    "strategy.recompute": "outside a pipeline the model's code decides what is recomputed",
    "strategy.data.reduce": "DeepSpeed reduces every microbatch from stage 2 up, and once a step "
    "below",
    "strategy.data.shard": "a group smaller than all ranks is for stage 3 only (MiCS)",
    "strategy.context.algorithm": "sequence_parallel_size is Ulysses",
    "strategy.expert": "experts are spread by deepspeed.moe in the user's code",
    "strategy.precision": "a ds_config.json knows fp32, bf16 and fp16",
    "training.sequence_length": "the sequence length is the user's data loader's",
    "training.steps": "a constant schedule has no length; the user's loop decides",
    "training.deterministic": "the user's script decides",
    "training.optimizer.final_ratio": "only a cosine ends above zero (cos_min_ratio)",
    "training.optimizer": "DeepSpeed's optimizer has no such setting",
}
"""Field, or beginning of fields -> why a ds_config.json does not say it."""
