"""Which keys a gpt-neox YAML may hold beside DeepSpeed's, and why a plan leaves some of them out;
hyphens may stand for underscores.
"""

from __future__ import annotations

from workbench.interop.deepspeed import deepspeed_keys
from workbench.interop.foreign_keys import key_names

_NAMES = key_names("gpt-neox")
MARKS = frozenset(_NAMES["marks"])
"""Keys that only gpt-neox has."""
SHAPE = _NAMES["shape"]
"""Keys that the model's shape follows from."""
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
        ("fp8", *(key for key in _NAMES["model"] if key.startswith("te_fp8"))),
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
KNOWN = deepspeed_keys.KNOWN | frozenset(
    (*(k for keys in _NAMES.values() for k in keys), *_REASONS)
)
SECTIONS = (
    *deepspeed_keys.SECTIONS,
    "sparsity_config",
    "soft_prompt_tuning",
    "autotuning",
    "attention_config",
)

WHYS = {
    **dict.fromkeys(_NAMES["model"], "a detail of gpt-neox's own modules that a plan does not set"),
    **dict.fromkeys(_NAMES["launch"], "how it is launched; a plan's launcher decides"),
    **dict.fromkeys(_NAMES["data"], "a plan names its text in `corpus`"),
    **dict.fromkeys(
        _NAMES["run"], "how a run is kept, logged or continued; a plan has its own fields for it"
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
