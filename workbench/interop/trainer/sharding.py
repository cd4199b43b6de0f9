"""How a trainer's states are sharded: by DeepSpeed, by FSDP, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError, Problem, refuse
from workbench.interop.accelerate import read_accelerate, read_fsdp
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.foreign_keys import flat, is_below
from workbench.interop.missing_fields import with_problems
from workbench.interop.trainer.arguments import Arguments
from workbench.interop.trainer.command_line import CommandLine
from workbench.interop.trainer.files_beside import section
from workbench.interop.translation import Imported, ImportOptions, KeyNote
from workbench.plan.resolution import model_shape
from workbench.plan.schema import written_fields
from workbench.untrusted_text import shown

SHARDING = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
"""The Trainer's word of how FSDP shards -> accelerate's."""
_OWN = (
    "xla",
    "xla_fsdp_v2",
    "xla_fsdp_settings",
    "xla_fsdp_grad_ckpt",
    "final_state_dict_type",
    "cpu_offload_pin_memory",
    "mixed_precision_policy",
)
"""Settings of the Trainer's FSDP section that accelerate's YAML has not."""
_F = "fsdp_config.fsdp_"
_KEPT = "how FSDP keeps or saves what it holds, of which a plan says nothing"
NOTHING_NAMED = (
    "the file names no DeepSpeed or FSDP settings: each rank holds all states. What an accelerate "
    "YAML or another argument of the launch says is not in it: --set strategy.data.zero=3 shards "
    "them"
)
OTHERS_KEEP = ("strategy.recompute", "strategy.attention", "strategy.kernels")
"""Fields of the strategy that the trainer's file says, whatever a sharding's file assumes."""


def deepspeed(
    a: Arguments, value: Any, given: ImportOptions, filled: Mapping[str, Any], lenient: bool
) -> dict[str, Any]:
    """Fields of a plan by DeepSpeed's settings, as plain data; `filled` is what the Trainer writes
    where they say auto, and compares where they do not.
    """
    config, prefix = section(value, "deepspeed", given, {"strategy.data.zero": 3})
    names = {key: prefix + key for key in flat(config)}
    inner = _read(
        lambda: read_deepspeed.read(_filled(config, filled, names), given, lenient), names
    )
    _account(a, inner, names)
    found = written_fields(inner.plan)
    return {
        "strategy": found["strategy"],
        "optimizer": _own_optimizer(config, found["training"].get("optimizer", {})),
    }


def _filled(
    config: Mapping[str, Any], filled: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """The settings as the Trainer hands them on. Raises `PlanError` where they differ from its own
    arguments, as the Trainer does.
    """
    result = copy.deepcopy(dict(config))
    for path, value in filled.items():
        *above, last = path.split(".")
        place: Any = result
        for key in above:
            place = place.get(key) if isinstance(place, Mapping) else None
        if not isinstance(place, dict):
            continue
        if not above and path.startswith(("train_", "gradient_acc", "gradient_clip")):
            place.setdefault(last, "auto")
        said = place.get(last)
        if said == "auto":
            place[last] = value
        elif said is not None and said != value and path not in _ONLY_FILLED:
            raise refuse(
                names.get(path, path),
                f"is {shown(said)}, but the arguments beside it say {shown(value)}, and the "
                "Trainer refuses two; legal: auto, or the same",
            )
    return result


_ONLY_FILLED = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_num_steps",
)
"""Settings that the Trainer fills, and leaves where they are numbers."""


def values(
    a: Arguments,
    given: ImportOptions,
    batch: Mapping[str, int],
    ranks: int,
    optimizer: Mapping[str, Any],
    steps: int,
    precision: str,
) -> dict[str, Any]:
    """Setting of DeepSpeed -> what the Trainer fills in (transformers' integrations/deepspeed.py).

    `batch` is that of the plan on `ranks` data-parallel ranks.
    """
    hidden = model_shape(given.model).hidden if given.model is not None else 0
    micro = batch["micro_batch"]
    found = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": batch["global_batch"] // (micro * ranks),
        "train_batch_size": batch["global_batch"],
        "gradient_clipping": optimizer.get("clip") or 0.0,
        "optimizer.params.lr": optimizer.get("learning_rate"),
        "optimizer.params.betas": [optimizer.get("beta1", 0.9), optimizer.get("beta2", 0.999)],
        "optimizer.params.eps": optimizer.get("epsilon", 1e-8),
        "optimizer.params.weight_decay": optimizer.get("weight_decay", 0.0),
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": optimizer.get("learning_rate"),
        "scheduler.params.warmup_num_steps": optimizer.get("warmup_steps", 0),
        "scheduler.params.total_num_steps": steps,
        "fp16.enabled": precision == "fp16",
        "bf16.enabled": precision in ("bf16", "fp8"),
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }
    return {key: value for key, value in found.items() if value is not None}


def _own_optimizer(config: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the optimizer and schedule that DeepSpeed's settings decide, where they have
    sections of these.
    """
    wanted = ["master", "moments"]
    if config.get("optimizer"):
        wanted += ["name", "learning_rate", "beta1", "beta2", "epsilon", "weight_decay"]
    if config.get("scheduler"):
        wanted += ["decay", "final_ratio", "warmup_steps", "learning_rate"]
    return {field: read[field] for field in wanted if field in read}


def fsdp(
    a: Arguments,
    value: Any,
    config: Any,
    axes: Mapping[str, Any],
    given: ImportOptions,
    precision: str,
    lenient: bool,
) -> dict[str, Any]:
    """The strategy of FSDP's settings, as plain data: the Trainer's words (`value`), its section
    or file (`config`), and sizes of axes.
    """
    settings, prefix = (
        ({}, "fsdp_config.")
        if config is None
        else section(config, "fsdp_config", given, {"strategy.data.zero": 3})
    )
    bare = {key.removeprefix("fsdp_"): said for key, said in settings.items()}
    names = {_F + key.removeprefix("fsdp_"): f"{prefix}{key}" for key in flat(settings)}
    _own_settings(a, bare, names)
    launch = {
        "distributed_type": "FSDP",
        "num_processes": given.gpus,
        "mixed_precision": {"fp32": "no", "tf32": "no"}.get(precision, precision),
        "fsdp_config": _settings(value, bare),
        "parallelism_config": dict(axes),
    }
    inner = _read(lambda: read_fsdp.read(launch, replace(given, gpus=None), lenient), names)
    _account(a, inner, names)
    return dict(written_fields(inner.plan)["strategy"])


def _own_settings(a: Arguments, bare: dict[str, Any], names: dict[str, str]) -> None:
    """Take out of FSDP's settings what accelerate's YAML does not have, or calls otherwise."""
    for key in [key for key in _OWN if key in bare]:
        said = bare.pop(key)
        for name in [name for name in names if is_below(name, (_F + key,))]:
            a.keys.untranslated.append(KeyNote(names.pop(name), said, _KEPT))
    if "cpu_offload" in bare:
        bare["offload_params"] = bare.pop("cpu_offload")
        names[f"{_F}offload_params"] = names.pop(f"{_F}cpu_offload", "cpu_offload")
    if bare.get("min_num_params") == 0:
        del bare["min_num_params"]
        a.keys.translated.append(names.pop(f"{_F}min_num_params"))


def launched(
    a: Arguments, line: CommandLine, given: ImportOptions, precision: str, lenient: bool
) -> dict[str, Any]:
    """The strategy of the accelerate YAML that the command launches by, as plain data."""
    launch = {**(line.launch or {}), "num_processes": given.gpus}
    launch["mixed_precision"] = {"fp32": "no", "tf32": "no"}.get(precision, precision)
    names = {key: f"{line.launch_name}: {key}" for key in flat(launch)}
    inner = _read(lambda: read_accelerate.read(launch, replace(given, gpus=None), lenient), names)
    _account(a, inner, names)
    return dict(written_fields(inner.plan)["strategy"])


def _settings(value: Any, bare: dict[str, Any]) -> dict[str, Any]:
    """accelerate's settings for the Trainer's words."""
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list | bool | None):
        raise refuse("fsdp", f"is {shown(value)}; must be words, or true or false")
    words = [str(word).lower() for word in words] if isinstance(words, list) else []
    known = (*SHARDING, "offload", "auto_wrap", "true")
    for word in words:
        if word not in known:
            raise refuse("fsdp", f"is {shown(value)}; legal: {', '.join(known[:-1])}")
    layers = bare.get("transformer_layer_cls_to_wrap")
    if isinstance(layers, list):
        bare["transformer_layer_cls_to_wrap"] = ",".join(map(str, layers))
    for word in words:
        if word in SHARDING and "sharding_strategy" not in bare and str(bare.get("version")) != "2":
            bare["sharding_strategy"] = SHARDING[word]
    if "offload" in words:
        bare.setdefault("offload_params", True)
    named = "auto_wrap" in words or layers or not (set(words) - {"true"})
    if named and not bare.get("min_num_params"):
        bare.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    elif bare.get("min_num_params"):
        bare.setdefault("auto_wrap_policy", "SIZE_BASED_WRAP")
    if isinstance(prefetch := bare.get("backward_prefetch"), str):
        bare["backward_prefetch"] = prefetch.upper()
    return bare


def _read(read: Any, names: Mapping[str, str]) -> Imported:
    try:
        found: Imported = read()
    except PlanError as error:
        raise with_problems(
            error, [Problem(names.get(p.field, p.field), p.message) for p in error.problems]
        ) from None
    return found


def _account(a: Arguments, inner: Imported, names: Mapping[str, str]) -> None:
    """Add what was read through another reader to the account of this file, by its own names."""
    keys = a.keys
    keys.translated += [names[key] for key in inner.translated if key in names]
    keys.untranslated += [
        KeyNote(names.get(n.field, n.field), n.value, n.why)
        for n in inner.untranslated
        if n.field in names
    ]
    keys.unknown += [
        KeyNote(names[n.field], n.value, n.why) for n in inner.unknown if n.field in names
    ]
    keys.assumed += [
        note
        for note in inner.assumed
        if (note.field.startswith("strategy.") and note.field not in OTHERS_KEEP)
        or note.field.startswith("fsdp_config.")
    ]
