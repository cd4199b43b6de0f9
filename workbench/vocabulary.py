"""Words and columns of a Profile's frames, without pandas: what checks a record must not load
it.
"""

from __future__ import annotations

MOMENTS = ("initialised", "forward_end", "peak", "before_optimizer", "after_optimizer", "maximum")
"""When memory was counted. `peak`: the instant of the largest sum; `maximum`: each category at its
own largest.
"""

TIERS = ("device", "host", "disk")
"""Where memory lies."""

MEANINGS: dict[str, str] = {
    "parameters": "the rank's parameters, its shard where they are sharded",
    "gradients": "the rank's gradients, its shard where they are sharded",
    "optimizer": "the optimizer's moments",
    "master": "fp32 copies of 16-bit weights, which the optimizer steps",
    "activations": "saved by forward for backward",
    "logits": "the head's output and its gradient",
    "gathered": "parameters all-gathered from other ranks' shards",
    "communication": "buffers of collectives and sends",
    "temporary": "allocated and freed within one action, such as casts and operators' results",
    "overhead": "tokens and targets; estimated on a GPU also cuBLAS workspace",
    "fragmentation": "reserved by torch's allocator on a GPU, but not allocated",
    "outside_allocator": "on a GPU beside torch's allocator: CUDA context, NCCL buffers",
}
"""Memory category -> what is in it."""
CATEGORIES = tuple(MEANINGS)
FRAGMENTATION, OUTSIDE = "fragmentation", "outside_allocator"
SHOWN_NAMES = {
    OUTSIDE: "CUDA context + NCCL",
    "temporary": "workspace",
    "after_optimizer": "after the optimizer step",
    "world": "world (grad norm, loss)",
}
"""Key of a frame, of telemetry or of `--json` that says too little to a person -> what is shown in
its place.
"""
NOT_ALLOCATED = (FRAGMENTATION, OUTSIDE)
"""Categories that are no part of what torch's allocator has handed out. Allocated: the sum of the
others; reserved: with `FRAGMENTATION`; in use on the GPU: with both.
"""
TENSOR_CATEGORIES = tuple(name for name in CATEGORIES if name not in NOT_ALLOCATED)
ALLOCATED = "allocated"
"""Category of a measured total: the allocator's own count, never a sum of categories."""
UNATTRIBUTED = "unattributed"
REST = (
    "in the allocator's count, but no tensor of a category: scratch of operators and "
    "libraries, rounding"
)
"""What `UNATTRIBUTED` is, the part of a measured total that its categories leave over."""

MEMORY_COUNTERS = (
    "max_memory_allocated",
    "max_memory_reserved",
    "num_alloc_retries",
    "device_memory_used",
    "process_memory_used",
)
"""Columns of a measured step on a GPU, in torch's words: peak bytes that its allocator handed out
and held in the step, allocations that had to free cached blocks first; on sampled steps NVML's
bytes in use on the GPU, by all processes and by the rank's own.
"""

REWARDS = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
"""Of a step's pairs of answers (DPO), in TRL's words: mean rewards of both answers, beta times the
log of the model's probability over the reference's; their difference; and the share of pairs whose
chosen answer has the larger one.
"""

COLUMNS: dict[str, tuple[str, ...]] = {
    "memory": ("run", "source", "rank", "step", "stage", "moment", "tier", "category", "bytes"),
    "levels": ("run", "source", "rank", "step", "action", "event", *TENSOR_CATEGORIES),
    "timeline": ("run", "source", "rank", "step", "stage", "microbatch", "action", "start", "end"),
    "collectives": (
        "run",
        "source",
        "rank",
        "step",
        "axis",
        "kind",
        "group_size",
        "dtype",
        "bytes",
        "count",
        "action",
        "seconds",
    ),
    "steps": (
        "run",
        "source",
        "rank",
        "step",
        "loss",
        "seconds",
        "cpu_seconds",
        "data_seconds",
        "tokens",
        "gradient_norm",
        "learning_rate",
        "loss_scale",
        "skipped",
        *MEMORY_COUNTERS,
    ),
}

PHASES_OF_ACTIONS = {
    **dict.fromkeys(("F", "REFERENCE"), "forward"),
    **dict.fromkeys(("B", "I", "W"), "backward"),
    **dict.fromkeys(("CLIP", "OPTIMIZER"), "optimizer"),
    **dict.fromkeys(
        ("P2P", "SEND_F", "SEND_B", "RECV_F", "RECV_B", "REDUCE_GRAD"), "communication"
    ),
}
"""Action of a step -> the phase that its own time counts to; of all else it is `other`."""
