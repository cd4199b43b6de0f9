"""DeepSpeed's `ds_config.json`, by https://www.deepspeed.ai/docs/config-json/: what it says of a
plan.

DeepSpeed takes from the user's code what it does not say here: the model, its sequence length, its
number of steps, whether layers are recomputed outside a pipeline, and experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as Collection
from dataclasses import replace
from typing import Any

from workbench.errors import refuse
from workbench.interop.deepspeed import deepspeed_keys as known
from workbench.interop.deepspeed.write_deepspeed import MIB, config
from workbench.interop.foreign_keys import ForeignKeys, flat, is_below
from workbench.interop.foreign_text import from_hjson, mapping
from workbench.interop.translation import (
    DEFAULT,
    FRAMEWORK_PROFILES,
    PIPED,
    Imported,
    ImportOptions,
    Translation,
    imported,
    lacks,
)
from workbench.interop.translation_loss import lost, nearest
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.schema import Plan, build_plan

FP16, BF16 = ("fp16", "fp16.enabled"), ("bf16", "bf16.enabled")
"""Keys that turn a 16-bit precision on."""
STEPS = 100
"""Steps of a plan that does not say them."""
AUTO, STANDS = "auto: the trainer fills it when it starts", " stands"
"""How the reason begins of a key that says auto, and how it ends where the plan's default was
taken.
"""
BUCKET = 500_000_000
"""Elements of DeepSpeed's gradient bucket where the file does not say."""


def read(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of a ds_config.json, as text or already parsed. Raises `PlanError` naming key and
    legal values.
    """
    given = given or ImportOptions()
    data = mapping(from_hjson(text, "file") if isinstance(text, str) else text, "file")
    keys = ForeignKeys(_respelled(data))
    keys.sections(*known.MAPPINGS)
    auto = left_to_trainer(keys)
    axes = _axes(keys)
    zero = keys.integer("zero_optimization.stage", 0, 3) or 0
    precision = precision_of(keys, auto, zero)
    world, batch = batch_of(keys, given, math.prod(axes.values()), auto)
    data_section = data_of(keys, zero, gradient_bytes(precision, given), auto)
    data_section["zero"] = stage_of(keys, zero, precision)
    optimizer, steps = optimizer_of(keys, auto)
    _fits(given, steps, optimizer.get("warmup_steps", 0))
    if not steps and "training.steps" not in auto:
        keys.assume("training.steps", STEPS, "the file has no length; the plan's default")
    keys.assume("training.sequence_length", "default", "the file has none; the plan's default")
    strategy = {
        "stack": FRAMEWORK_PROFILES["deepspeed"] if axes["pipeline"] == 1 else PIPED,
        "data": data_section,
        **precision,
        "tensor": {"size": axes["tensor"]},
        "pipeline": {"size": axes["pipeline"]},
        "context": {"size": axes["context"], "algorithm": "ulysses"},
        "recompute": _recompute(keys),
    }
    plan: dict[str, Any] = {
        "model": given.the_model("a ds_config.json does not say the model"),
        "cluster": given.cluster(world),
        "strategy": strategy,
        "training": {**batch, **steps, "optimizer": optimizer},
        "telemetry": {
            "trackers": [name for name in ("tensorboard", "wandb") if keys.flag(f"{name}.enabled")]
        },
    }
    assume_left(keys, auto, plan)
    keys.finish(known.KNOWN, known.WHYS, known.SECTIONS, lenient)
    return imported("deepspeed", plan, keys, given)


def _respelled(data: Mapping[str, Any]) -> dict[str, Any]:
    """Today's keys where a file has older ones, which DeepSpeed reads in their absence: `bfloat16`,
    and true or false in place of the section of ZeRO, which means stage 1 or 0.
    """
    found = dict(data)
    if "bf16" not in found and "bfloat16" in found:
        found["bf16"] = found.pop("bfloat16")
    if isinstance(on := found.get("zero_optimization"), bool):
        found["zero_optimization"] = {"stage": int(on)}
    return found


def _fits(given: ImportOptions, steps: Mapping[str, int], warmup: int) -> None:
    """Refuse a warm-up that is longer than the plan's default length, where nobody says the
    length.
    """
    if not steps and warmup > STEPS and "training.steps" not in given.sets:
        raise lacks(
            "training.steps",
            f"the file does not say the length of the run, and the warm-up takes {warmup} "
            f"steps; give --set training.steps=N, N at least {warmup}",
            {"training.steps": warmup},
        )


def left_to_trainer(keys: ForeignKeys) -> set[str]:
    """Fields that "auto" leaves to the trainer above DeepSpeed, which fills them: the plan's
    defaults stand.
    """
    fields: set[str] = set()
    autos = keys.auto_keys()
    for key in autos:
        known_key = key in known.KNOWN or key in known.AUTO or is_below(key, known.SECTIONS)
        if key == "zero_optimization.stage" or not known_key:
            continue  # no trainer fills it
        meant = known.AUTO.get(key, ())
        stands = f"; the plan's default of {' and '.join(meant)}{STANDS}" if meant else ""
        if key in FP16 and not set(autos) & set(BF16):
            stands = "; fp16 was taken, the only 16-bit section it leaves open"
        keys.skip(key, AUTO + stands)
        fields |= set(meant)
    return fields


def assume_left(keys: ForeignKeys, auto: Collection[str], plan: Mapping[str, Any]) -> None:
    """Tell the fields that are left to the trainer; where the rest of the file says one, that its
    default is not it.
    """
    said = flat(plan)
    for place, note in enumerate(keys.untranslated):
        meant = known.AUTO.get(note.field, ())
        if note.value == "auto" and meant and set(meant) <= set(said) and note.why.endswith(STANDS):
            why = f"{AUTO}; the rest of the file says {' and '.join(meant)}, which was taken"
            keys.untranslated[place] = replace(note, why=why)
    for field in sorted(auto - set(said)):
        keys.assume(field, DEFAULT, "the file says auto, which a trainer fills; the plan's default")


def _axes(keys: ForeignKeys) -> dict[str, int]:
    """Ranks of the axes beside data; `autotp_size` 0 means none."""
    return {
        "tensor": keys.integer("tensor_parallel.autotp_size", 0) or 1,
        "context": keys.integer("sequence_parallel_size") or 1,
        "pipeline": keys.integer("pipeline.stages") or 1,
    }


def batch_of(
    keys: ForeignKeys, given: ImportOptions, others: int, auto: Collection[str]
) -> tuple[int, dict[str, int]]:
    """(ranks, batch sizes): train_batch_size = train_micro_batch_size_per_gpu x accumulation x
    data-parallel ranks.
    """
    total, micro, steps, data = (keys.integer(key) for key in known.BATCH)
    if (
        data is None
        and given.gpus is None
        and total
        and micro
        and steps
        and total % (micro * steps) == 0
    ):
        data = total // (micro * steps)
    world = given.world(
        None if data is None else data * others, "train_batch_size, data_parallel_size"
    )
    if world % others:
        raise refuse(
            "gpus", f"is {world}, which tensor x sequence x pipeline = {others} does not divide"
        )
    return world, _sizes(keys, total, micro, steps, world // others, auto)


def _sizes(
    keys: ForeignKeys,
    total: int | None,
    micro: int | None,
    steps: int | None,
    data: int,
    auto: Collection[str],
) -> dict[str, int]:
    """Batch sizes for `data` data-parallel ranks; two of three give the third, and what is left out
    follows.
    """
    said = {"micro_batch": micro, "global_batch": total}
    if steps is None and not (total and micro) and auto & {f"training.{field}" for field in said}:
        if micro is None and "training.micro_batch" not in auto:
            keys.assume("training.micro_batch", DEFAULT, "the file has none; the plan's default")
        return {field: size for field, size in said.items() if size is not None}
    if micro is None and total is None:
        keys.assume("training.micro_batch", 1, "the file has no number; the plan's default")
        if steps is None:
            keys.assume("training.global_batch", "default", "the file has none; the plan's default")
            return {"micro_batch": 1}
        micro = 1
    if micro is None:
        assert total is not None
        micro, left = divmod(total, (steps or 1) * data)
        if left or not micro:
            raise refuse(
                "train_batch_size",
                f"is {total}, not a multiple of gradient_accumulation_steps {steps or 1} "
                f"x {data} data-parallel ranks",
            )
    if total is None:
        total = micro * (steps or 1) * data
    if total % (micro * data) or (steps is not None and total != micro * steps * data):
        near = (
            max(1, total // (micro * data)) * micro * data
            if steps is None
            else micro * steps * data
        )
        count = "a whole number" if steps is None else f"gradient_accumulation_steps {steps}"
        raise refuse(
            "train_batch_size",
            f"is {total}, but train_micro_batch_size_per_gpu {micro} x {count} x {data} "
            f"data-parallel ranks is not; legal: {near}",
        )
    return {"micro_batch": micro, "global_batch": total}


def precision_of(keys: ForeignKeys, auto: Collection[str], zero: int) -> dict[str, str]:
    """The plan's precision, and the dtype that gradients add up in; no precision where it is left
    to the trainer.
    """
    enabled = [name for name in ("bf16", "fp16") if keys.flag(f"{name}.enabled")]
    if len(enabled) == 2:
        raise refuse("fp16.enabled", "is true beside bf16.enabled; legal: one of them")
    if not enabled and _left_fp16_alone(keys):
        enabled = [keys.assume("strategy.precision", "fp16", "the file says auto of fp16 alone")]
    open_ = not enabled and "strategy.precision" in auto
    precision = enabled[0] if enabled else "parameters" if open_ else "fp32"
    if precision == "fp32" and not any(
        keys.has_key(f"{name}.enabled") for name in ("bf16", "fp16")
    ):
        keys.assume("strategy.precision", precision, "DeepSpeed's default")
    kinds = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    accumulated = keys.choice("data_types.grad_accum_dtype", kinds)
    if not open_ and accumulated not in (None, "fp32", precision):
        raise refuse(
            "data_types.grad_accum_dtype",
            f"is {accumulated} with parameters in {precision}; "
            f"legal: {' or '.join(dict.fromkeys(('fp32', precision)))}",
        )
    if accumulated is None:
        accumulated = gradients_of(keys, precision, zero)
    return {"gradient_dtype": accumulated} | ({} if open_ else {"precision": precision})


def gradients_of(keys: ForeignKeys, precision: str, zero: int) -> str:
    """What gradients add up in where the file does not say: fp32 for bf16 parameters that ZeRO does
    not touch.
    """
    if precision == "bf16" and zero == 0:
        return str(
            keys.assume(
                "strategy.gradient_dtype", "fp32", "DeepSpeed's default for bf16 without ZeRO"
            )
        )
    return str(
        keys.assume("strategy.gradient_dtype", precision, "DeepSpeed's default: as the parameters")
    )


def stage_of(keys: ForeignKeys, zero: int, precision: Mapping[str, str]) -> int:
    """The stage of ZeRO that runs: DeepSpeed's `BF16_Optimizer`, which steps bf16 parameters by
    fp32 gradients, shards its states over the data-parallel ranks without ZeRO too.
    """
    if zero or (precision.get("precision"), precision["gradient_dtype"]) != ("bf16", "fp32"):
        return zero
    why = "DeepSpeed's optimizer of bf16 parameters shards its states at stage 0 as at 1"
    return int(keys.assume("strategy.data.zero", 1, why))


def _left_fp16_alone(keys: ForeignKeys) -> bool:
    """Whether fp16 is the only 16-bit precision that the file leaves to the trainer."""
    left = {note.field for note in keys.untranslated if note.value == "auto"}
    return bool(left & set(FP16)) and not left & set(BF16)


def gradient_bytes(precision: Mapping[str, str], given: ImportOptions) -> int:
    """Bytes of an element of a gradient; where precision is left open, of what the plan's default
    is on this GPU.
    """
    if (dtype := precision["gradient_dtype"]) != "parameters":
        return DTYPE_BYTES[dtype]
    wanted = {"precision": given.sets.get("strategy.precision", "auto")}
    bare = build_plan({"model": "tiny", "cluster": given.cluster(1), "strategy": wanted}).resolve()
    return DTYPE_BYTES[bare.strategy.precision]


def data_of(keys: ForeignKeys, zero: int, wide: int, auto: Collection[str]) -> dict[str, Any]:
    """The plan's `data` section; an element of a gradient has `wide` bytes."""
    overlap = keys.flag("zero_optimization.overlap_comm")
    if overlap is None:
        overlap = keys.assume(
            "strategy.data.overlap", zero == 3, "DeepSpeed's default: from stage 3 up"
        )
    found: dict[str, Any] = {
        "zero": zero,
        "overlap": overlap,
        "reduce": "microbatch" if zero >= 2 else "step",
        **_offload(keys, zero),
    }
    bucket = keys.integer("zero_optimization.reduce_bucket_size")
    if bucket is not None:
        found["bucket_mib"] = bucket * wide / MIB
    elif "strategy.data.bucket_mib" not in auto:
        found["bucket_mib"] = BUCKET * wide / MIB
        keys.assume(
            "strategy.data.bucket_mib", found["bucket_mib"], "DeepSpeed's default: 5e8 elements"
        )
    shard = keys.integer("zero_optimization.mics_shard_size", -1)
    return found | ({"shard": shard} if shard is not None and shard > 0 else {})


def _offload(keys: ForeignKeys, zero: int) -> dict[str, Any]:
    """Fields of where states live, and the optimizer's share. A plan that offloads parameters
    offloads the optimizer too (ZeRO-Infinity).
    """
    optimizer, optimizer_key = _device(keys, "offload_optimizer.device", "cpu_offload")
    parameters, parameters_key = _device(
        keys, "offload_param.device", "cpu_offload_params", "cpu_offload_param"
    )
    for key, device, least in ((optimizer_key, optimizer, 1), (parameters_key, parameters, 3)):
        if device == "nvme" and {optimizer, parameters} == {"nvme", "cpu"}:
            keys.mark_untranslated(
                key, "strategy.data.offload_tier is one for all that is offloaded; disk was taken"
            )
        if device != "none" and zero < least:
            raise refuse(key, f"is {device} at stage {zero}; legal: none, or stage {least} or more")
    if parameters != "none" and optimizer == "none":
        keys.mark_untranslated(
            parameters_key,
            "a plan offloads parameters only together with the optimizer; both stay on the GPU",
        )
        return {"offload": "none"}
    tier = {"offload_tier": "disk"} if "nvme" in (optimizer, parameters) else {}
    if parameters != "none":
        return {"offload": "parameters", **tier}
    share = _share_offloaded(keys, zero) if optimizer != "none" else 0.0
    ratio = {"offload_ratio": share} if share != 1 else {}
    return {"offload": "optimizer", **ratio, **tier} if share else {"offload": "none"}


def _share_offloaded(keys: ForeignKeys, zero: int) -> float:
    """The share of the optimizer that the host steps (ZeRO-Offload++)."""
    key = "zero_optimization.offload_optimizer.ratio"
    ratio = keys.number(key, 0, 1)
    if ratio not in (None, 1.0) and zero < 3:
        keys.mark_untranslated(key, "DeepSpeed reads it at stage 3 only; the host steps all")
        return 1.0
    return 1.0 if ratio is None else ratio


def _device(keys: ForeignKeys, name: str, *older: str) -> tuple[str, str]:
    """(where a part of the states lives, the key that says so); `older` are its switches."""
    key = f"zero_optimization.{name}"
    on = [switch for switch in older if keys.flag(f"zero_optimization.{switch}")]
    device = keys.choice(key, {name: name for name in ("none", "cpu", "nvme")})
    if device is None and on:
        return "cpu", f"zero_optimization.{on[0]}"
    return device or "none", key


def _recompute(keys: ForeignKeys) -> str:
    interval = keys.integer("pipeline.activation_checkpoint_interval", 0)
    if interval is None:
        return str(
            keys.assume(
                "strategy.recompute", "none", "decided by the model's code, not by this file"
            )
        )
    if interval > 1:
        keys.mark_untranslated(
            "pipeline.activation_checkpoint_interval",
            "a plan recomputes layer by layer; full taken",
        )
    return "full" if interval else "none"


def optimizer_of(keys: ForeignKeys, auto: Collection[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """(optimizer and learning-rate schedule, steps if the schedule says them)."""
    params = "optimizer.params"
    kind = keys.choice("optimizer.type", known.OPTIMIZERS)
    name = known.PLAN_OPTIMIZER.get(kind or "adamw")
    if name is None:
        keys.mark_untranslated("optimizer.type", "a plan trains with adamw or sgd; adamw was taken")
    found: dict[str, Any] = {"name": name or "adamw", **_clip(keys, auto)}
    found |= _betas(keys, "none" if kind is None else found["name"], auto)
    for key, (field, default) in known.DEFAULTS.items():
        value = keys.number(f"{params}.{key}", 0)
        if value is not None:
            found[field] = value
        elif kind is not None and default is not None and f"training.optimizer.{field}" not in auto:
            found[field] = keys.assume(
                f"training.optimizer.{field}", default, "the optimizer's own default"
            )
    if kind is None:
        keys.assume(
            "training.optimizer.name", "adamw", "the file has no optimizer; the plan's default"
        )
    if any(
        [
            keys.flag("bf16.bf16_master_weights_and_grads"),
            keys.flag("fp16.fp16_master_weights_and_grads"),
        ]
    ):
        found["master"] = "none"
    if keys.flag("bf16.bf16_optimizer_states"):
        found["moments"] = "bf16"
    schedule, steps = _schedule(keys, found.get("learning_rate"), auto)
    return found | schedule, steps


def _betas(keys: ForeignKeys, name: str, auto: Collection[str]) -> dict[str, float]:
    """Adam's two decay rates, or SGD's momentum, and their own defaults where the file names an
    optimizer (`name`).
    """
    key, found = "optimizer.params.betas", dict[str, float]()
    betas = keys.take(key)
    if betas is not None:
        if not (
            isinstance(betas, list) and len(betas) == 2 and all(_share(beta) for beta in betas)
        ):
            raise refuse(
                key, f"is {betas!r:.60}; must be two numbers from 0 to below 1, e.g. [0.9, 0.95]"
            )
        found = {"beta1": float(betas[0]), "beta2": float(betas[1])}
    if name == "sgd" and (momentum := keys.number("optimizer.params.momentum", 0, 1)) is not None:
        found["beta1"] = momentum
    for field, default in known.BETAS.get(name, {}).items():
        if field not in found and f"training.optimizer.{field}" not in auto:
            found[field] = keys.assume(
                f"training.optimizer.{field}", default, "the optimizer's own default"
            )
    return found


def _share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _clip(keys: ForeignKeys, auto: Collection[str]) -> dict[str, float | None]:
    clip = keys.number("gradient_clipping", 0)
    if clip is None and "training.optimizer.clip" in auto:
        return {}
    if clip is None:
        keys.assume("training.optimizer.clip", None, "DeepSpeed's default: no clipping")
    return {"clip": clip or None}


def _schedule(
    keys: ForeignKeys, rate: float | None, auto: Collection[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    params = "scheduler.params"
    kind = keys.choice(
        "scheduler.type", {name: name for name in (*known.DECAYS, "OneCycle", "LRRangeTest")}
    )
    if kind not in known.DECAYS:
        if kind is not None:
            keys.mark_untranslated(
                "scheduler.type",
                "a plan decays constantly, linearly or by a cosine; constant was taken",
            )
        return {"decay": "constant"}, {}
    steps = keys.integer(f"{params}.total_num_steps")
    found: dict[str, Any] = {
        "decay": known.DECAYS[kind],
        **_peak(keys, kind, rate, auto),
        **_warmup(keys, steps, auto),
    }
    if kind == "WarmupCosineLR":
        found["final_ratio"] = _end(keys)
    elif kind == "WarmupDecayLR":
        found["final_ratio"] = 0.0
    return found, {} if steps is None else {"steps": steps}


def _end(keys: ForeignKeys) -> float:
    """The share of the peak that a cosine falls to."""
    ratio = keys.number("scheduler.params.cos_min_ratio", 0, 1)
    if ratio is None:
        return float(
            keys.assume(
                "training.optimizer.final_ratio", known.END, "DeepSpeed's default of cos_min_ratio"
            )
        )
    return ratio


def _peak(
    keys: ForeignKeys, kind: str, rate: float | None, auto: Collection[str]
) -> dict[str, float]:
    """The rate that the warm-up rises to: DeepSpeed's schedule sets it, whatever the optimizer's
    own rate is.
    """
    field, peak = (
        "training.optimizer.learning_rate",
        keys.number("scheduler.params.warmup_max_lr", 0),
    )
    if peak is None and (kind == "WarmupCosineLR" or field in auto):
        return {}
    if peak is None and kind == "WarmupLR":
        if field not in {note.field for note in keys.assumed}:
            keys.assume(
                field,
                DEFAULT if rate is None else rate,
                "the optimizer's own rate, which DeepSpeed takes "
                "without scheduler.params.warmup_max_lr",
            )
        return {}
    if peak is None:
        keys.assumed[:] = [note for note in keys.assumed if note.field != field]
        peak = keys.assume(
            field, known.PEAK, "DeepSpeed's default of scheduler.params.warmup_max_lr"
        )
    if peak != rate and keys.has_key("optimizer.params.lr"):
        keys.mark_untranslated(
            "optimizer.params.lr",
            f"the schedule rises to warmup_max_lr = {peak:g}, which was taken",
        )
    return {"learning_rate": peak}


def _warmup(keys: ForeignKeys, steps: int | None, auto: Collection[str]) -> dict[str, int]:
    """Steps of the warm-up, which a plan makes linear and DeepSpeed logarithmic where the file does
    not say.
    """
    field, found = (
        "training.optimizer.warmup_steps",
        keys.integer("scheduler.params.warmup_num_steps", 0),
    )
    shape = keys.choice("scheduler.params.warmup_type", {"log": "log", "linear": "linear"})
    if shape == "log":
        keys.mark_untranslated("scheduler.params.warmup_type", "a plan warms up linearly")
    elif shape is None and found != 0:
        keys.mark_untranslated(
            "scheduler.type",
            "without warmup_type DeepSpeed warms up logarithmically; a plan does linearly",
        )
    if found is None and field in auto:
        return {}
    if found is None:
        found = min(known.WARMUP, steps or known.WARMUP)
        keys.assume(field, found, f"DeepSpeed's default of warmup_num_steps is {known.WARMUP}")
    return {"warmup_steps": found}


def write(plan: Plan) -> Translation:
    """The plan as a ds_config.json, and the fields that it does not say. Raises `PlanError` for an
    illegal plan.
    """
    full = plan.resolve()
    text = json.dumps(config(full), indent=2) + "\n"
    with nearest("deepspeed"):
        back = read(text, ImportOptions(full.shape, full.gpu, None, full.fabric))
    return Translation(text, lost(plan, full, back, known.LOST, ("model", "cluster.gpu")))
