"""Which keys a ds_config.json may hold, why a plan leaves some of them out, and which fields of a
plan it cannot say.
"""

from __future__ import annotations

from workbench.interop.foreign_keys import key_names

_NAMES = key_names("deepspeed")
MAPPINGS = _NAMES["mappings"]
"""Keys that hold other keys."""
BATCH = _NAMES["batch"]
SECTIONS = _NAMES["sections"]
"""Sections and keys of other matters: whatever stands in them is known, and reported as not
translated.
"""
KNOWN = frozenset(
    {
        *BATCH,
        *_NAMES["translated"],
        *(f"zero_optimization.{key}" for key in _NAMES["zero"]),
        *(
            f"zero_optimization.offload_{part}.{key}"
            for part in ("param", "optimizer")
            for key in _NAMES["offload"]
        ),
    }
)
"""Dotted keys that are known one by one: those that are translated, and ZeRO's."""
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
    "compile": "how engine.compile() compiles, where the script calls it: then strategy.kernels is "
    "compiled",
    "fp16": "a plan scales the loss by its own rule",
    "steps_per_print": "logging; a run keeps its own telemetry",
    "wall_clock_breakdown": "logging; a run keeps its own telemetry",
    "communication_data_type": "a plan reduces gradients in strategy.gradient_dtype",
    "fp32_allreduce": "a plan reduces gradients in strategy.gradient_dtype",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

LOST = {
    "model": "the model is the user's code",
    "strategy.pipeline": "the pipeline's schedule and partition are PipelineModule's, in the "
    "user's code",
    "strategy.recompute": "outside a pipeline the model's code decides what is recomputed",
    "strategy.data.reduce": "DeepSpeed reduces every microbatch from stage 2 up, and once a step "
    "below",
    "strategy.data.zero": "DeepSpeed's pipelines shard the optimizer's states only (stage 1), and "
    "its optimizer of bf16 parameters by fp32 gradients shards them at stage 0 too",
    "strategy.data.offload": "DeepSpeed's pipelines offload the optimizer's states only",
    "strategy.data.shard": "DeepSpeed shards over all ranks; a smaller group (MiCS) is removed",
    "strategy.context.algorithm": "sequence_parallel_size is Ulysses",
    "strategy.expert": "experts are spread by deepspeed.moe in the user's code",
    "strategy.precision": "a ds_config.json knows fp32, bf16 and fp16",
    "training.sequence_length": "the sequence length is the user's data loader's",
    "training.steps": "a constant schedule has no length; the user's loop decides",
    "training.deterministic": "the user's script decides",
    "training.optimizer.final_ratio": "only a cosine ends above zero (cos_min_ratio)",
    "training.optimizer.master": "DeepSpeed keeps no fp32 copy of bf16 only from stage 1 up",
    "training.optimizer.moments": "DeepSpeed's are bf16 only from stage 1 up, without an fp32 copy",
    "training.optimizer": "DeepSpeed's optimizer has no such setting",
}
"""Field, or beginning of fields -> why a ds_config.json does not say it."""
