"""Which keys a torchtitan job file may hold, why a plan leaves some out, and which fields of a plan
it cannot say.

Names and defaults are those of `torchtitan/config/job_config.py` in pytorch/torchtitan, of 2024 to
2025.
"""

from __future__ import annotations

MODELS = {
    ("llama3", "8B"): "llama-3-8b",
    ("llama3", "70B"): "llama-3-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "3B"): "llama-3.2-3b",
    ("llama2", "7B"): "llama-2-7b",
    ("llama2", "13B"): "llama-2-13b",
    ("llama2", "70B"): "llama-2-70b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
"""(model.name, model.flavor) -> the model of the catalog that it is, by
torchtitan/models/*/__init__.py.
"""
KERNEL_OF_FLAVOR = r"_(flex|varlen)(_attn)?$"
"""End of a flavor that says how attention is computed; the shape is that without it."""

SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
LONE = {
    "InterleavedZeroBubble": "interleaved",
    "LoopedBFS": "gpipe",
    "PipelineScheduleSingle": "",
    "PipelineScheduleMulti": "",
    "_PipelineScheduleRuntime": "",
}
"""Schedules that a plan has no name for, and the nearest it has; "" where a table (CSV) says it."""

_SECTIONS = {
    "job": "config_file dump_folder description use_for_integration_test print_args print_config "
    "save_config_file "
    "save_config_folder custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq enable_memory_snapshot "
    "save_memory_snapshot_folder "
    "profiler_active profiler_warmup",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder "
    "save_for_all_ranks enable_wandb "
    "enable_color_printing rank_0_only",
    "model": "name flavor tokenizer_path hf_assets_path converters print_after_conversion "
    "norm_type",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward fused",
    "lr_scheduler": "warmup_steps decay_ratio decay_type lr_min min_lr_factor total_steps",
    "training": "dataset dataset_path local_batch_size batch_size global_batch_size seq_len "
    "max_norm steps "
    "enable_cpu_offload mixed_precision_param mixed_precision_reduce dtype compile gc_freq "
    "gc_debug seed "
    "deterministic warmup_steps tensor_parallel_degree data_parallel_degree "
    "data_parallel_replicate_degree "
    "data_parallel_shard_degree",
    "parallelism": "data_parallel_replicate_degree enable_compiled_autograd "
    "data_parallel_shard_degree "
    "fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel "
    "enable_async_tensor_parallel "
    "pipeline_parallel_degree pipeline_parallel_split_points module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap "
    "context_parallel_degree "
    "context_parallel_rotate_method context_parallel_load_balancer expert_parallel_degree "
    "expert_tensor_parallel_degree expert_parallel_comm_backend expert_parallel_a2a_impl",
    "checkpoint": "enable_checkpoint enable folder interval initial_load_path "
    "initial_load_model_only "
    "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf "
    "export_dtype async_mode "
    "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint "
    "create_seed_checkpoint load_only "
    "enable_ft_dataloader_checkpoints interval_type model_weights_only",
    "activation_checkpoint": "mode selective_ac_option "
    "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
    "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
    "save_traces_file_prefix mode",
    "validation": "enabled enable dataset dataset_path local_batch_size seq_len freq steps",
    "memory_estimation": "enabled disable_fake_mode",
    "compile": "enable components backend",
    "experimental": "custom_import custom_args_module custom_model_path context_parallel_degree "
    "pipeline_parallel_degree enable_async_tensor_parallel enable_compiled_autograd",
}
KNOWN = frozenset(f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split())
MAPPINGS = tuple(_SECTIONS)
OPEN = ("float8", "mx", "quantize", "fault_tolerance", "debug", "experimental", "comm")
"""Sections of other matters: whatever stands in them is known, and reported as not translated."""

WHYS = {
    "job": "how it is launched; a run keeps its own directory",
    "profiling": "a run keeps its own telemetry",
    "metrics": "logging; a run keeps its own telemetry",
    "model.tokenizer_path": "a plan names its text in `corpus`",
    "model.hf_assets_path": "a plan names its text in `corpus`",
    "training.dataset": "a plan names its text in `corpus`",
    "training.dataset_path": "a plan names its text in `corpus`",
    "optimizer.implementation": "a plan's optimizer is fused or not as strategy.kernels says",
    **dict.fromkeys(("float8", "mx", "quantize"), "strategy.precision says it in one word"),
    "lr_scheduler.total_steps": "a plan decays over all its steps",
    "parallelism.disable_loss_parallel": "a plan splits the loss over tensor-parallel ranks",
    "parallelism.enable_async_tensor_parallel": "a plan hides no tensor-parallel communication",
    "parallelism.context_parallel_rotate_method": "a plan's ring passes keys and values along",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

LOST = {
    "model": "torchtitan names its own models and flavors, and this is none of them",
    "strategy.data.zero": "torchtitan shards everything (FSDP2) or nothing, and shards whenever "
    "context is split",
    "strategy.data.shard": "torchtitan shards over a divisor of its data ranks, times all context "
    "ranks",
    "strategy.data.offload": "torchtitan offloads parameters, gradients and optimizer together, "
    "where it shards",
    "strategy.data.keep_gathered": "torchtitan says it for what it shards, and keeps them for "
    "ZeRO-2's sake",
    "strategy.data": "FSDP2 sets it by itself",
    "strategy.tensor.sequence": "torchtitan's tensor parallelism always splits the sequence too",
    "strategy.tensor": "torchtitan's tensor parallelism is 1-D",
    "strategy.pipeline.schedule": f"torchtitan here knows {', '.join(SCHEDULES)} and tables",
    "strategy.context.algorithm": "torchtitan's context parallelism is a ring",
    "strategy.expert.tensor": "torchtitan splits an expert by all tensor ranks or by none",
    "strategy.placement": "torchtitan orders tensor, context, data, pipeline",
    "strategy.recompute": "torchtitan recomputes none, selected operators, every n-th layer, "
    "or all",
    "strategy.precision": "torchtitan computes in bfloat16, float32 or float8",
    "strategy.gradient_dtype": "torchtitan reduces gradients in float32 or bfloat16",
    "strategy.attention": "attention under torchtitan is as its framework profile says",
    "strategy.kernels": "torchtitan runs its layers eagerly or compiled",
    "training.optimizer.name": "torchtitan trains with AdamW or Adam",
    "training.optimizer": "torchtitan has no such setting",
    "finetune": "torchtitan's pre-training has no fine-tuning",
    "checkpoint.keep": "torchtitan keeps two or more",
    "corpus": "torchtitan names its own datasets",
}
"""Field, or beginning of fields -> why a torchtitan job does not say it."""
