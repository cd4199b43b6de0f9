"""Which keys a gpt-neox YAML may hold beside DeepSpeed's, and why a plan leaves some of them out.

Names and defaults are those of `megatron/neox_arguments/` in EleutherAI/gpt-neox; hyphens may stand
for underscores.
"""

from __future__ import annotations

from workbench.interop.deepspeed import deepspeed_keys

MARKS = frozenset(
    (
        "pipe_parallel_size",
        "pos_emb",
        "gpt_j_residual",
        "no_weight_tying",
        "output_layer_parallelism",
        "scaled_upper_triang_masked_softmax_fusion",
        "checkpoint_factor",
        "partition_activations",
    )
)
"""Keys that only gpt-neox has."""
SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "intermediate_size",
    "feedforward_size",
    "expansion_factor",
    "mlp_multiple_of",
    "mlp_type",
    "activation",
    "norm",
    "layernorm_epsilon",
    "rms_norm_epsilon",
    "pos_emb",
    "rotary_pct",
    "rotary_emb_base",
    "max_position_embeddings",
    "no_weight_tying",
    "gpt_j_residual",
    "attention_config",
    "sliding_window_width",
    "use_bias_in_mlp",
    "use_bias_in_attn_linear",
    "use_qk_layernorm",
    "padded_vocab_size",
    "tokenizer_type",
    "gpt_j_tied",
    "num_unique_layers",
    "num_experts",
    "moe_num_experts",
    "moe_top_k",
    "moe_loss_coeff",
    "moe_token_dropping",
    "expert_interval",
)
"""Keys that the model's shape follows from."""
_STRATEGY = (
    "pipe_parallel_size model_parallel_size context_parallel_size sequence_parallel precision "
    "checkpoint_activations "
    "checkpoint_num_layers num_gpus num_nodes"
)
_TRAINING = (
    "seq_length train_iters lr_decay_iters lr_decay_style warmup min_lr weight_decay "
    "hidden_dropout attention_dropout "
    "seed eval_interval eval_iters checkpoint_factor save_interval keep_last_n_checkpoints "
    "use_wandb tensorboard_dir"
)
_MODEL_DETAILS = (
    "pipe_partition_method world_size is_pipe_parallel model_arch scalenorm_epsilon "
    "rpe_num_buckets rpe_max_distance "
    "opt_pos_emb_offset sparsity_config param_sharing_style make_vocab_size_divisible_by "
    "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion bias_gelu_fusion "
    "bias_dropout_fusion "
    "rope_fusion layernorm_fusion rmsnorm_fusion fp16_lm_cross_entropy init_method_std "
    "apply_query_key_layer_scaling "
    "use_cpu_initialization attention_softmax_in_fp32 init_method output_layer_init_method "
    "gmlp_attn_dim "
    "use_bias_in_norms soft_prompt_tuning output_layer_parallelism rotary_save_freqs_buffer "
    "use_flashattn_swiglu "
    "num_experts moe_num_experts moe_top_k moe_expert_parallel_size moe_loss_coeff "
    "expert_interval moe_type "
    "moe_token_dropping lr use_bnb_optimizer override_lr_scheduler use_checkpoint_lr_scheduler "
    "optimizer_type "
    "transformer_engine te_layernorm_mlp te_mha te_columnparallel te_rowparallel te_fp8_format "
    "te_fp8_margin fp8"
)
_LAUNCH = (
    "hostfile include exclude master_port master_addr launcher detect_nvlink_pairs force_multi "
    "no_ssh_check comment "
    "deepspeed deepspeed_mpi deepspeed_slurm deepscale deepscale_config user autotuning_run "
    "account cluster_name "
    "distributed_backend local_rank rank lazy_mpu_init global_num_gpus num_workers rdzv_id "
    "use_shared_fs"
)
_DATA = (
    "data_path train_data_paths valid_data_paths test_data_paths train_data_weights "
    "valid_data_weights "
    "test_data_weights label_data_paths train_label_data_paths valid_label_data_paths "
    "test_label_data_paths "
    "weight_by_num_documents weighted_sampler_alpha data_impl pack_impl mmap_warmup split "
    "vocab_file merge_file "
    "allow_chopped eod_mask_loss short_seq_prob reset_position_ids reset_attention_mask "
    "dataset_impl s3_path"
)
_RUN = (
    "save config_files checkpoint_validation_with_forward_pass checkpoint_scale extra_save_iters "
    "save_iters "
    "no_save_optim no_save_rng no_load_optim no_load_rng finetune exit_interval iteration "
    "do_train do_valid do_test "
    "char_level_ppl adlr_autoresume adlr_autoresume_interval log_dir log_interval "
    "log_grad_pct_zeros log_param_norm "
    "log_grad_norm log_optimizer_states log_gradient_noise_scale gradient_noise_scale_n_batches "
    "gradient_noise_scale_cpu_offload wandb_group wandb_team wandb_project wandb_host "
    "wandb_init_all_ranks "
    "wandb_run_name git_hash eval_results_prefix eval_tasks text_gen_type temperature top_p top_k "
    "maximum_tokens "
    "prompt_end sample_input_file sample_output_file num_samples recompute return_logits profile "
    "profile_step_start "
    "profile_step_stop memory_profiling memory_profiling_path"
)
_COPIED = "gpt-neox writes {} over it"
_REASONS = {
    "batch_size": _COPIED.format("train_micro_batch_size_per_gpu"),
    "clip_grad": _COPIED.format("gradient_clipping"),
    "gas": _COPIED.format("gradient_accumulation_steps"),
    "load": "where this job left off, or a checkpoint of gpt-neox; a plan names its own in "
    "checkpoint.load",
    "partition_activations": "a plan keeps the inputs of recomputed layers whole on every "
    "tensor-parallel rank",
    "checkpoint_in_cpu": "strategy.offload_activations says it, for stack workbench only",
    "contiguous_checkpointing": "a plan keeps the inputs of recomputed layers where they were "
    "computed",
    "deepspeed_activation_checkpointing": "which library recomputes; a plan says what in "
    "strategy.recompute",
    "synchronize_each_layer": "a plan waits for no GPU between layers",
    "profile_backward": "a plan recomputes layers without timing each",
    "use_mup": "a plan scales no learning rate or output by the width (muP)",
    **dict.fromkeys(
        ("fp8", "te_fp8_format", "te_fp8_margin"),
        "a plan says fp8 in strategy.precision, which is not set by it",
    ),
    "coord_check": "a test of muP, not a training",
    "onnx_safe": "a plan's operators are its own",
    **dict.fromkeys(
        ("dynamic_loss_scale", "loss_scale", "loss_scale_window", "min_scale", "hysteresis"),
        "a plan scales the loss by its own rule",
    ),
}
"""Key -> why a plan does not hold it, one by one."""
KNOWN = (
    deepspeed_keys.KNOWN
    | frozenset(
        word
        for words in (_STRATEGY, _TRAINING, _MODEL_DETAILS, _LAUNCH, _DATA, _RUN)
        for word in words.split()
    )
    | frozenset((*SHAPE, *_REASONS))
)
SECTIONS = (
    *deepspeed_keys.SECTIONS,
    "sparsity_config",
    "soft_prompt_tuning",
    "autotuning",
    "attention_config",
)

WHYS = {
    **dict.fromkeys(
        _MODEL_DETAILS.split(), "a detail of gpt-neox's own modules that a plan does not set"
    ),
    **dict.fromkeys(_LAUNCH.split(), "how it is launched; a plan's launcher decides"),
    **dict.fromkeys(_DATA.split(), "a plan names its text in `corpus`"),
    **dict.fromkeys(
        _RUN.split(), "how a run is kept, logged or continued; a plan has its own fields for it"
    ),
    **deepspeed_keys.WHYS,
    **_REASONS,
    "make_vocab_size_divisible_by": "a plan pads the vocabulary as its tensor ranks need",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "geglu": "geglu", "swiglu": "swiglu"}
POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi"}
VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "CharLevelTokenizer": 512}
"""Tokenizer -> its vocabulary, where that is the same whatever file it loads."""
