"""Which keys a torchtitan job file may hold, why a plan leaves some out, and which fields of a plan
it cannot say.
"""

from __future__ import annotations

from workbench.interop.foreign_keys import key_names

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
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}
"""(model.name, model.flavor) -> the model of the catalog that it is, by
torchtitan/models/*/__init__.py.
"""
VERSIONS = ("0.1.0", "0.2.0", "0.2.1", "0.2.2", "0.3.0")
"""Releases that jobs are written for; from PYTHON on they are Python, before it TOML."""
PYTHON = "0.3.0"


def has_model(version: str, name: str, flavor: str) -> bool:
    """True where a release has one of `MODELS`."""
    if name == "llama3":
        return version == PYTHON or flavor not in ("1B", "3B")
    return version != "0.1.0" and name != "llama2"


_OLDER = {"debug.seed": "training.seed", "debug.deterministic": "training.deterministic"}
RENAMED: dict[str, dict[str, str]] = {
    "0.1.0": {
        **_OLDER,
        "compile.enable": "training.compile",
        "checkpoint.enable": "checkpoint.enable_checkpoint",
        "lr_scheduler.min_lr_factor": "lr_scheduler.lr_min",
    },
    "0.2.0": _OLDER,
}
"""Release -> key of 0.2.2 -> what it is called there."""
LACKS: dict[str, tuple[str, ...]] = {
    "0.1.0": (
        "validation",
        "training.dtype",
        "parallelism.expert_parallel_degree",
        "parallelism.expert_tensor_parallel_degree",
    ),
    "0.3.0": ("job", "optimizer.name", "parallelism.expert_tensor_parallel_degree"),
}
"""Release -> keys and tables of 0.2.2 that it does not have."""
CONVERTERS = {"0.1.0": {"fp8": "float8", "mxfp8": "mx"}, "0.3.0": {"fp8": "float8", "mxfp8": "mx"}}
NAMED_CONVERTERS = {"fp8": "quantize.linear.float8", "mxfp8": "quantize.linear.mx"}
"""Precision -> converter of linear layers; `CONVERTERS` holds those of releases that differ."""
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

_NAMES = key_names("torchtitan")
KNOWN = frozenset(f"{section}.{key}" for section, keys in _NAMES.items() for key in keys)
MAPPINGS = tuple(_NAMES)
OPEN = (
    "float8",
    "mx",
    "quantize",
    "fault_tolerance",
    "debug",
    "experimental",
    "comm",
    "training.dataloader",
    "validation.dataloader",
    "dump_folder",
    "hf_assets_path",
    "dataloader",
    "tokenizer",
    "loss",
    "override",
)
"""Sections of other matters: whatever stands in them is known, and reported as not translated."""

WHYS = {
    "job": "how it is launched; a run keeps its own directory",
    "profiling": "a run keeps its own telemetry",
    "metrics": "logging; a run keeps its own telemetry",
    "model.tokenizer_path": "a plan names its text in `corpus`",
    "model.hf_assets_path": "a plan names its text in `corpus`",
    "training.dataset": "a plan names its text in `corpus`",
    "training.dataset_path": "a plan names its text in `corpus`",
    **dict.fromkeys(
        (
            "hf_assets_path",
            "dataloader",
            "tokenizer",
            "training.dataloader",
            "validation.dataloader",
        ),
        "a plan names its text in `corpus`",
    ),
    "dump_folder": "a run keeps its own directory",
    "loss": "a plan's loss is the cross entropy of its model",
    "model.attn_backend": "a plan says how operators run in strategy.attention",
    "training.disable_cuda_graphs": "a plan captures no graphs",
    "optimizer.implementation": "a plan's optimizer is fused or not as strategy.kernels says",
    **dict.fromkeys(("float8", "mx", "quantize"), "strategy.precision says it in one word"),
    "lr_scheduler.total_steps": "a plan decays over all its steps",
    "parallelism.disable_loss_parallel": "a plan splits the loss over tensor-parallel ranks",
    "parallelism.enable_async_tensor_parallel": "a plan hides no tensor-parallel communication",
    "parallelism.context_parallel_rotate_method": "a plan's ring passes keys and values along",
}
"""Key, or beginning of keys -> why a plan does not hold it."""

LOST = {
    "model": "torchtitan names its own models and flavors, and this is none of them: until the job "
    "names yours, it trains torchtitan's own default, the debugmodel of llama3",
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
    "strategy.gradient_dtype": "torchtitan reduces gradients in float32",
    "strategy.attention": "attention under torchtitan is as its framework profile says",
    "strategy.kernels": "torchtitan runs its layers eagerly or compiled",
    "training.optimizer.name": "torchtitan trains with AdamW or Adam",
    "training.optimizer": "torchtitan has no such setting",
    "finetune": "torchtitan's pre-training has no fine-tuning",
    "checkpoint.keep": "torchtitan keeps two or more",
    "corpus": "torchtitan names its own datasets",
}
"""Field, or beginning of fields -> why a torchtitan job does not say it."""
