"""Batch, optimizer, schedule, evaluation and checkpoints of a torchtitan job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.untrusted_text import shown

_ASYNCHRONOUS = {"disabled": False, "async": True, "async_with_pinned_mem": True}
"""checkpoint.async_mode -> whether steps go on while a checkpoint is written."""


def read_training(
    keys: ForeignKeys, data: int, pipeline: int, sets: Mapping[str, Any]
) -> dict[str, Any]:
    """The plan's sections `training`, `checkpoint` and `telemetry`; `data` ranks share the
    batch.
    """
    steps = keys.integer("training.steps")
    if steps is None:
        steps = int(keys.assume("training.steps", 10000, "torchtitan's default"))
    length = keys.integer("training.seq_len")
    if length is None:
        length = int(keys.assume("training.sequence_length", 2048, "torchtitan's default"))
    batch = _batch(keys, data, pipeline)
    training: dict[str, Any] = {
        **batch,
        "steps": steps,
        "sequence_length": length,
        "optimizer": _optimizer(keys, steps, sets),
        "evaluation": _evaluation(keys, data, batch["global_batch"]),
    }
    # Both are of [debug] from 0.2.1 on.
    if (seed := keys.renamed_integer("debug.seed", "training.seed", 0)) is not None:
        training["seed"] = seed
    flags = [keys.flag(f"{table}.deterministic") for table in ("training", "debug")]
    if any(flags):
        training["deterministic"] = True
    trackers = [name for name in ("tensorboard", "wandb") if keys.flag(f"metrics.enable_{name}")]
    timeout = keys.integer("comm.train_timeout_seconds")
    telemetry = {"trackers": trackers} | (
        {"timeout_seconds": timeout} if timeout is not None else {}
    )
    return {"training": training, "checkpoint": _checkpoint(keys), "telemetry": telemetry}


def _batch(keys: ForeignKeys, data: int, pipeline: int) -> dict[str, int]:
    """Under a pipeline the local batch is what flows through it, in microbatches; else it is the
    micro-batch.
    """
    local = keys.renamed_integer("training.local_batch_size", "training.batch_size")
    if local is None:
        local = int(
            keys.assume("training.micro_batch", 8, "torchtitan's default of local_batch_size")
        )
    total = keys.integer("training.global_batch_size", -1)
    if total is not None and total != -1 and (total < 1 or total % (local * data)):
        near = max(1, total // (local * data)) * local * data
        raise refuse(
            "training.global_batch_size",
            f"is {total}, not a multiple of local_batch_size {local} x {data} "
            f"data-parallel ranks; legal: -1, {near}, {near + local * data}",
        )
    total = local * data if total in (None, -1) else total
    micro = keys.integer("parallelism.pipeline_parallel_microbatch_size") or 1
    if pipeline == 1:
        return {"micro_batch": local, "global_batch": total}
    if local % micro:
        raise refuse(
            "parallelism.pipeline_parallel_microbatch_size",
            f"is {micro}, which does not divide local_batch_size {local}",
        )
    if total != local * data:
        keys.mark_untranslated(
            "training.local_batch_size",
            "a plan fills the pipeline once a step, with the whole batch",
        )
    return {"micro_batch": micro, "global_batch": total}


def _optimizer(keys: ForeignKeys, steps: int, sets: Mapping[str, Any]) -> dict[str, Any]:
    name = keys.text("optimizer.name")
    if name is not None and name.lower() not in ("adamw", "adam"):
        if "training.optimizer.name" not in sets:
            raise refuse(
                "optimizer.name",
                f"is {shown(name)}, whose states and steps a plan does not know; legal: "
                "AdamW, Adam; or choose what is planned in its place, e.g. --set "
                "training.optimizer.name=adamw",
            )
        keys.mark_untranslated(
            "optimizer.name",
            f"a plan trains with adamw or sgd; {sets['training.optimizer.name']} is set",
        )
    if (name or "").lower() == "adam":
        keys.mark_untranslated(
            "optimizer.name", "a plan's AdamW decays weights apart from gradients; adamw was taken"
        )
    found: dict[str, Any] = {"name": "adamw"}
    defaults = {
        "lr": ("learning_rate", 8e-4),
        "beta1": ("beta1", 0.9),
        "beta2": ("beta2", 0.95),
        "eps": ("epsilon", 1e-8),
        "weight_decay": ("weight_decay", 0.1),
    }
    for key, (field, default) in defaults.items():
        value = keys.number(f"optimizer.{key}", 0)
        if value is None:
            value = keys.assume(f"training.optimizer.{field}", default, "torchtitan's default")
        found[field] = value
    clip = keys.number("training.max_norm", 0)
    found["clip"] = (
        keys.assume("training.optimizer.clip", 1.0, "torchtitan's default")
        if clip is None
        else clip or None
    )
    return found | _schedule(keys, steps)


def _warmup(keys: ForeignKeys, steps: int) -> int:
    """Steps of the warm-up, within the run: torchtitan cuts a longer one too."""
    key, older = "lr_scheduler.warmup_steps", "training.warmup_steps"
    warmup = keys.renamed_integer(key, older, 0)
    if warmup is None:
        return int(
            keys.assume("training.optimizer.warmup_steps", min(200, steps), "torchtitan's default")
        )
    if warmup > steps:
        keys.mark_untranslated(
            key if keys.has_key(key) else older,
            f"a plan warms up within its steps; {steps} were taken, of {warmup}",
        )
    return min(warmup, steps)


def _schedule(keys: ForeignKeys, steps: int) -> dict[str, Any]:
    warmup = _warmup(keys, steps)
    kind = keys.choice(
        "lr_scheduler.decay_type", {"linear": "linear", "sqrt": "sqrt", "cosine": "cosine"}
    )
    share = keys.number("lr_scheduler.decay_ratio", 0, 1)
    if kind is None and share != 0:
        kind = keys.assume("training.optimizer.decay", "linear", "torchtitan's default")
    elif kind == "sqrt":
        keys.mark_untranslated(
            "lr_scheduler.decay_type",
            "a plan decays constantly, linearly or by a cosine; linear taken",
        )
        kind = "linear"
    if share is not None and share > 0:
        keys.mark_untranslated(
            "lr_scheduler.decay_ratio", "a plan decays from the end of the warm-up on"
        )
    least = keys.number("lr_scheduler.min_lr_factor", 0, 1)
    before = keys.number("lr_scheduler.lr_min", 0, 1)
    found = {"warmup_steps": warmup, "decay": "constant" if share == 0 else kind}
    return {
        **found,
        "final_ratio": next((value for value in (least, before) if value is not None), 0.0),
    }


def _evaluation(keys: ForeignKeys, data: int, total: int) -> dict[str, int]:
    """Interval of a plan's evaluations and their global batches of `total` sequences; torchtitan
    counts batches of its own of each of `data` ranks.
    """
    flags = [keys.flag(f"validation.{key}") for key in ("enable", "enabled")]
    if not any(flags):
        return {"every": 0}
    steps, every = keys.integer("validation.steps", -1), keys.integer("validation.freq")
    found, local = {"every": every or 10}, keys.integer("validation.local_batch_size")
    if steps is None:
        return found
    if steps < 1:
        keys.mark_untranslated(
            "validation.steps", "a plan reads a number of batches, not the whole text"
        )
        return found
    batches = -(-steps * (local or 8) * data // total)
    if batches * total != steps * (local or 8) * data:
        keys.mark_untranslated(
            "validation.steps",
            f"a plan reads whole global batches; {batches} of {total} sequences were taken",
        )
    if local is None:
        keys.assume(
            "training.evaluation.batches",
            batches,
            f"{steps} steps of 8, torchtitan's default of validation.local_batch_size",
        )
    return found | {"batches": batches}


def _checkpoint(keys: ForeignKeys) -> dict[str, Any]:
    flags = [keys.flag(f"checkpoint.{key}") for key in ("enable", "enable_checkpoint")]
    every, keep = keys.integer("checkpoint.interval"), keys.integer("checkpoint.keep_latest_k", 0)
    found: dict[str, Any] = {"every": (every or 500) if any(flags) else 0}
    if keys.choice("checkpoint.interval_type", {"steps": 1, "seconds": 0}) == 0 and every:
        keys.mark_untranslated(
            "checkpoint.interval", "in seconds; a plan counts steps, and 500 were taken"
        )
        found["every"] = 500 if any(flags) else 0
    mode = keys.choice("checkpoint.async_mode", _ASYNCHRONOUS)
    if any(flags):
        found["asynchronous"] = bool(mode)
    for key in ("checkpoint.interval", "checkpoint.async_mode"):
        if keys.has_key(key) and not any(flags):
            keys.mark_untranslated(key, "checkpoints are off in the file")
    if keep == 0:
        keys.mark_untranslated(
            "checkpoint.keep_latest_k",
            "a plan keeps a number of checkpoints; its own default was taken",
        )
    elif keep is not None:
        found["keep"] = keep
    elif any(flags):
        found["keep"] = keys.assume("checkpoint.keep", 10, "torchtitan's default")
    load = keys.text("checkpoint.initial_load_path")
    return found | ({"load": load} if load else {})
