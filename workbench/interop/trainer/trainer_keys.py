"""Arguments of trainers that a plan cannot say: which are refused, because memory, time or learning
would be another's, and why the others change none of the three.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.interop.foreign_keys import NO_FIELD
from workbench.interop.trainer.dialects import SPELLING, dialect

_OPTIMIZER = "its optimizer states are not those of AdamW, which an estimate counts"
_IMAGES = "trains on images, and a plan's model reads text"
_PARTS = "trains a part of the weights, and a plan trains all of them or adapters"
_OTHER = "has other models in memory and other steps than a plan's SFT and DPO"
_WEIGHTS = "trains whole layers beside adapters: 16 bytes a parameter of them are in no estimate"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "use_galore",
            "use_apollo",
            "use_badam",
            "use_adam_mini",
            "use_muon",
            "optim_target_modules",
            "adafactor",
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        ("use_dora", "peft_use_dora"),
        "DoRA trains a magnitude a row too, and computes the norm of W + BA in every forward",
    ),
    **dict.fromkeys(
        (
            "use_mora",
            "use_llama_pro",
            "relora",
            "lisa_n_layers",
            "unfrozen_parameters",
            "peft_trainable_token_indices",
            "spectrum_top_fraction",
        ),
        _PARTS,
    ),
    **dict.fromkeys(("lora_modules_to_save", "additional_target"), _WEIGHTS),
    **dict.fromkeys(
        ("lora_rank_pattern", "peft_layer_replication", "lora_target_parameters"),
        "adapters of several widths, or of tensors that are no linear layers, are in no plan",
    ),
    **dict.fromkeys(
        (
            "reward_model",
            "process_reward_model",
            "center_rewards_coefficient",
            "ebft",
            "use_kd",
            "kd_trainer",
            "diffusion",
            "hatchery",
            "nemo_gym_enabled",
            "use_asft_loss",
            "sync_ref_model",
            "reference_free",
        ),
        _OTHER,
    ),
    **dict.fromkeys(
        (
            "processor_type",
            "image_size",
            "image_resize_algorithm",
            "image_max_pixels",
            "video_max_pixels",
            "media_dir",
            "freeze_language_model",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(
        (
            "use_unsloth",
            "unsloth_lora_mlp",
            "unsloth_lora_qkv",
            "unsloth_lora_o",
            "unsloth_cross_entropy_loss",
        ),
        "Unsloth's kernels keep other activations and take other time than any that is estimated",
    ),
    **dict.fromkeys(
        ("shift_attn", "s2_attention"),
        "attention within shifted groups computes fewer scores than a plan's",
    ),
    "sage_attention": "attention of 8-bit scores takes other time than any that is estimated",
    "dense_mixer": "every expert runs in forward, which no estimate counts",
    **dict.fromkeys(
        ("peft_layers_to_transform", "peft_layers_pattern"),
        "finetune.lora.targets says layers by patterns, blocks.[0-3].*",
    ),
    "lisa_step_interval": _PARTS,
    "mixture_of_depths": "tokens that skip layers are in no plan",
    "load_in_8bit": "a plan's base has 4 bits or 16",
    "gptq": "a plan's 4 bits are nf4 or int4 that it quantises itself",
    "model_quantization_config": "a plan's base has 4 bits or 16",
    "quantize_moe_experts": "a plan's 4 bits are those of finetune.quantize, of all linear layers",
    "qat": "quantisation in training is in no plan",
    **dict.fromkeys(
        ("use_kt", "ple_cpu_offload", "layer_offloading"),
        "weights that live in host memory are strategy.data.offload's, which a Trainer "
        "does otherwise",
    ),
    **dict.fromkeys(
        ("use_mca", "use_hyper_parallel"),
        "another engine, with its own parallelism, runs it; its arguments are read by themselves",
    ),
    "selective_checkpointing": "which operators are saved is the model's code; a plan's "
    "selective saves all but attention's core",
    "expert_parallel_size": "strategy.expert.size is of stacks whose exchange of tokens an "
    "estimate knows, and this is a plugin's",
    "tiled_mlp": "tiles of the sequence through an MLP are in no plan",
    "use_onebitllms": "weights of one bit are in no plan",
}
"""Argument that makes the plan another -> why; harmless where it is off."""

_DATA = "datasets are the script's; a plan names its text in `corpus`"
_LOG = "logging; a run keeps its own telemetry"
_LOADING = "how batches are loaded; the same memory of the GPU and time, where loading keeps up"
WHYS: dict[str, str] = {
    "per_device_eval_batch_size": "a plan's evaluation has the micro-batch of training",
    "eval_batch_size": "a plan's evaluation has the micro-batch of training",
    "per_gpu_eval_batch_size": "a plan's evaluation has the micro-batch of training",
    "eval_steps": "read where the evaluation is by steps",
    "save_steps": "read where checkpoints are by steps",
    "neftune_noise_alpha": "noise on embeddings changes what is learned; the same memory and time",
    "noisy_embedding_alpha": "noise on embeddings changes what is learned; the same memory and "
    "time",
    "label_smoothing_factor": "smoothed labels change what is learned; the same memory and time",
    "dpo_label_smoothing": "smoothed labels change what is learned; the same memory and time",
    "label_smoothing": "smoothed labels change what is learned; the same memory and time",
    "loraplus_lr_ratio": "B learns faster than A; a plan's adapters have one rate, the same "
    "memory and time",
    "loraplus_lr_embedding": "of LoRA+; a plan has one rate for all weights",
    "embedding_lr": "a plan has one rate for all weights; the same memory and time",
    "pissa_init": "adapters start from W's largest singular vectors; the same memory and step time",
    "pissa_iter": "of how adapters start; the same memory and step time",
    "pissa_convert": "of how adapters are saved",
    "peft": "of how adapters start (LoftQ); the same memory and step time",
    "peft_init_lora_weights": "of how adapters start; the same memory and step time",
    "router_aux_loss_coef": "model.moe.auxiliary_loss says it for a shape; the same memory and "
    "time",
    "moe_aux_loss_coef": "model.moe.auxiliary_loss says it for a shape; the same memory and time",
    "upcast_layernorm": "norms in fp32: + 2 bytes x their parameters",
    "upcast_lmhead_output": "logits in fp32, as an estimate of this stack has them",
    "resize_vocab": "rows that are added to embedding and head are in no estimate",
    "adapter_name_or_path": "finetune.lora.initial names a folder of adapters to go on from",
    "lora_model_dir": "finetune.lora.initial names a folder of adapters to go on from",
    "auto_find_batch_size": "a batch that does not fit is halved by the Trainer, for less "
    "memory; the plan keeps the file's",
    "kt_lora_expert_intermediate_size": "a width of adapters, and no strategy.expert.size",
    "group_by_length": "rows of like length in one batch: less padding, so less time than an "
    "estimate's",
    "length_column_name": "of group_by_length",
    "train_sampling_strategy": "the order of rows; the same memory and time",
    "gradient_checkpointing_kwargs": "which of torch's two checkpoints; the same layers are "
    "computed again",
    "activation_checkpointing_kwargs": "which of torch's two checkpoints; the same layers are "
    "computed again",
    "use_reentrant_gc": "which of torch's two checkpoints; the same layers are computed again",
    "use_unsloth_gc": "inputs of layers wait in host memory; an estimate keeps 2 bytes x "
    "tokens x hidden x layers of them on the GPU",
    "activation_offloading": "activations wait in host memory; an estimate keeps them on the "
    "GPU, its most",
    "use_cache": "a cache of keys and values is off in training",
    "torch_compile_backend": "strategy.kernels says compiled in one word",
    "torch_compile_mode": "strategy.kernels says compiled in one word",
    "packing_strategy": "how rows are put together; an estimate has full sequences",
    "eval_packing": "of evaluation",
    "eval_sample_packing": "of evaluation",
    "neat_packing": "rows of a sequence do not attend to each other: less attention than an "
    "estimate's",
    "pad_to_sequence_len": "true: sequences are full, as an estimate's are; false: the longest "
    "of a batch counts",
    "pad_to_multiple_of": "lengths are rounded up; an estimate has full sequences",
    "padding_free": "rows of a batch lie in one sequence without padding; an estimate has full "
    "sequences",
    "batch_flattening": "rows of a batch lie in one sequence without padding; an estimate has "
    "full sequences",
    "precompute_ref_log_probs": "true: the reference is computed before the first step, as a "
    "plan's of method full is; false: see finetune.preference",
    "ddp_timeout": "telemetry.timeout_seconds is the deadline of this engine's own collectives",
    "ddp_find_unused_parameters": "of torch's DistributedDataParallel; the same gradients are "
    "reduced",
    "average_tokens_across_devices": "the loss is a mean over the tokens of all ranks, as a "
    "plan's is",
    "tf32": "fp32 products in TF32; of 16-bit layers nothing changes",
    "ring_attn_func": "a plan's ring passes keys and values along",
    "heads_k_stride": "a plan's ring passes keys and values along",
    "rope_scaling": "the model's shape says it: give a config.json that has it (--model)",
    "overrides_of_model_config": "the model's shape says it: give a config.json that has it "
    "(--model)",
    "lora_mlp_kernel": "adapters' products in one kernel: fewer activations and less time than "
    "an estimate's",
    "lora_qkv_kernel": "adapters' products in one kernel: fewer activations and less time than "
    "an estimate's",
    "lora_o_kernel": "adapters' products in one kernel: fewer activations and less time than "
    "an estimate's",
    "lora_embedding_kernel": "adapters' products in one kernel: fewer activations and less "
    "time than an estimate's",
    "freeze_vision_tower": "of models that read images",
    "freeze_multi_modal_projector": "of models that read images",
    "plugins": "code that axolotl loads; what it turns on of the loss and of norms is in "
    "strategy.kernels and strategy.loss",
    "data_seed": "training.seed is one for all draws",
    "do_train": "the script trains, or not",
    "do_eval": "the script evaluates, or not",
    "lr_scheduler_kwargs": "a plan's learning-rate schedule has no such setting",
    "bnb_4bit_compute_dtype": "products of the 4-bit base are in strategy.precision",
    "bnb_4bit_quant_storage": "how 4 bits are stored for FSDP; as large",
    "early_stopping_patience": "the run may end before its steps",
    "early_stopping_steps": "the run may end before its steps",
}
"""Argument -> why a plan does not hold it."""
_FAMILIES = {
    "logging|log_|swanlab|trackio|comet|mlflow|wandb|otel|profil|run_name|plot_loss|disable_tqdm|"
    "use_(?:swanlab|wandb|comet|otel|trackio)|include_(?:num|tok|tk|eff)|print_param|project": _LOG,
    "dataset|test_dataset|pretraining_dataset|train_file|validation|template|chat_template|"
    "tokenizer|val_set|val_size|max_(?:train_|eval_)?samples|special_tokens|default_system|"
    "train_on_|mask_history|assistant_only|completion_only|overwrite_cache|preprocess|tokenized|"
    "streaming|shuffle|eos_token|pad_token|truncation|auto_insert|max_(?:prompt|completion)|"
    "text_column|tokens$|eot_tokens|skip_prepare|mix_strategy|buffer_size|split_|interleave|role|"
    "test_split|sample_packing_|eval_dataset|keep_linebreaks": _DATA,
    "push_to_hub|hub_|hf_|output_dir|overwrite_output|resume_from|save_|load_best|auto_resume|"
    "lora_out|trust_remote|model_revision|revision|cache_dir|model_type|type_of_model|"
    "low_cpu_mem": "where weights come from and go to is no part of a plan",
    "saves_per_epoch|evals_per_epoch": "read where something is saved, or evaluated, by shares of "
    "the run",
    "dataloader_|remove_unused|accelerator_config": _LOADING,
    "vllm|sglang_|generate_|generation|gradio_|lm_eval_|export_|eval_|infer_|num_generation|do_sample|"
    "num_beams|temperature|top_[kp]|max_new_tokens|predict_|bench_|do_(?:bench|causal|predict)": (
        "of what is done with the model besides training"
    ),
    "strict|debug|loss_watchdog|is_(?:llama|mistral|qwen|falcon)|env$": (
        "of the program's own checks"
    ),
    "fp8_|flex_attn": "strategy.precision and strategy.attention say one word",
    "lora_|bnb_|use_(?:bnb|rslora|peft)|peft|double_quant|quantization_": (
        "of adapters and a 4-bit base, read where those are on"
    ),
    "torch_empty_cache|gc_": "the allocator's cache is emptied each so many steps: time",
    "galore_|qgalore_|apollo_|badam_|dion_|adam_beta3|adam_epsilon2": (
        "of an optimizer that is refused"
    ),
    "freeze_|oft_|module_dropout|relora_|lisa_|ppo_|kto_|orpo_|simpo_|cpo_|kd_|reward_|"
    "spectrum_|mora|diffusion|noise_schedule|nemo_gym_|kt_": (
        "of a method that is refused, read where that is on"
    ),
    "ddp_|dispatch_batches|ray_|tpu_|no_cuda|local_rank|use_cpu|use_ray|device|master_|world_": (
        "how it is launched; a plan's launcher decides"
    ),
    "image_|video_|audio_|crop_to|use_audio": "of models that read images or sound",
    "ref_|reference_|model_adapter_name|force_use_ref": (
        "names the reference of pairs; a second model in memory takes 2 bytes x its parameters, "
        "and a plan's reference is what training starts from"
    ),
    "use_liger_loss|dpo_use_liger|chunked_cross|flash_attn_|moe_|experts_impl|expert_backend|"
    "use_(?:scatter|sonic|dsv4|glm|kernels|v1_kernels)|fused_attn|large_head|sdpa_varlen|torch_compile_|"
    "deepcompile": (
        "kernels that an estimate of this stack does not have: less memory or time than it says"
    ),
    "lr_|embedding_lr|cosine_|jagged_|optim_args|loss_weights|label_pad|f_(?:alpha_)?div|discopop|"
    "ld_alpha|rpo_alpha|pref_|use_(?:weighting|dft|eaft|pose)|eaft_|asft_|grokfast|dpo_|"
    "scaling_softmax|lora_alpha_pattern": "changes what is learned; the same memory and time",
}
"""Beginning of arguments' names -> why a plan holds none of them, where nothing above says more."""
WHYS |= {key: f"off; on, {why}" for key, why in REFUSED.items()}

KNOWN = frozenset[str]().union(*(dialect(format).known for format in SPELLING))
"""Names of all formats together."""


WHYS |= {
    name: next((why for pattern, why in _FAMILIES.items() if re.match(pattern, name)), NO_FIELD)
    for name in KNOWN
    if name not in WHYS
}
PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "LMEvalPlugin", "SwanLabPlugin")
"""Plugins of axolotl that change kernels and logging alone."""


def is_on(value: Any) -> bool:
    """True where the value of an argument turns something on."""
    off = (None, False, 0, 0.0, "", "false", "no", "none")
    return not (value in off if not isinstance(value, list | dict) else not value)
