"""Batch, optimizer, schedule, checkpoints and evaluation of Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.translation import DEFAULT, KEEPS_ALL

_DECAYS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "",
    "WSD": "",
}


def read_training(keys: ForeignKeys, data: int) -> dict[str, Any]:
    """The plan's sections `training`, `checkpoint` and `telemetry`; `data` ranks share the
    batch.
    """
    batch = _batch(keys, data)
    units = {"samples": batch["global_batch"]}
    if "sequence_length" in batch:
        units["tokens"] = batch["global_batch"] * batch["sequence_length"]
    steps = _steps(keys, units)
    optimizer = _optimizer(keys, steps or 100, units)
    training: dict[str, Any] = {
        **batch,
        "optimizer": optimizer,
        "evaluation": _evaluation(keys),
        "seed": _seed(keys),
        "deterministic": bool(keys.flag("deterministic-mode")),
    }
    if steps is not None:
        training["steps"] = steps
    training["dropout"] = _dropout(keys)
    trackers = [
        name
        for name, key in (("tensorboard", "tensorboard-dir"), ("wandb", "wandb-project"))
        if keys.skip(key, "only that it is written; a run keeps it in its own directory")
    ]
    minutes = keys.integer("distributed-timeout-minutes") or 10
    found = {
        "training": training,
        "telemetry": {"trackers": trackers, "timeout_seconds": 60 * minutes},
    }
    return found | {"checkpoint": _checkpoint(keys)}


def _dropout(keys: ForeignKeys) -> float:
    """Dropout of the residual stream; that of attention's probabilities is noted, as a plan has
    none.
    """
    if "attention-dropout" not in keys:
        keys.assume(
            "--attention-dropout",
            0.1,
            "Megatron's default; a plan never drops attention's probabilities",
        )
    dropout = keys.number("hidden-dropout", 0, 0.999)
    return (
        float(keys.assume("training.dropout", 0.1, "Megatron's default"))
        if dropout is None
        else dropout
    )


def _batch(keys: ForeignKeys, data: int) -> dict[str, int]:
    micro, total = (
        keys.renamed_integer("micro-batch-size", "batch-size"),
        keys.integer("global-batch-size"),
    )
    if micro is None:
        micro = int(
            keys.assume(
                "training.micro_batch",
                1,
                "Megatron requires --micro-batch-size; the plan's default",
            )
        )
    if total is None:
        total = int(
            keys.assume(
                "training.global_batch", micro * data, "Megatron's default: one microbatch a rank"
            )
        )
    if total % (micro * data):
        near = max(1, total // (micro * data)) * micro * data
        raise refuse(
            "--global-batch-size",
            f"is {total}, not a multiple of --micro-batch-size {micro} x {data} "
            f"data-parallel ranks; legal: {near}, {near + micro * data}",
        )
    length = keys.integer("seq-length") or keys.integer("encoder-seq-length")
    found = {"micro_batch": micro, "global_batch": total}
    if length is None:
        keys.assume(
            "training.sequence_length",
            "default",
            "Megatron requires --seq-length; the plan's default",
        )
        return found
    return {**found, "sequence_length": length}


def _steps(keys: ForeignKeys, units: Mapping[str, int]) -> int | None:
    """Steps of the run; Megatron-DeepSpeed ends it at --train-tokens too, whichever comes first."""
    steps, samples = keys.integer("train-iters"), keys.integer("train-samples")
    if steps is not None and samples is not None:
        raise refuse("--train-samples", "is given beside --train-iters; legal: one of them")
    if samples is not None:
        steps = max(1, samples // units["samples"])
    tokens = _in_steps(keys, "train-tokens", units)
    if tokens is not None:
        return max(1, tokens if steps is None else min(tokens, steps))
    if steps is None:
        keys.assume("training.steps", 100, "Megatron requires --train-iters; the plan's default")
    return steps


def _in_steps(keys: ForeignKeys, key: str, units: Mapping[str, int]) -> int | None:
    """The steps of what an argument counts in samples or tokens, as its last word says."""
    unit = key.rpartition("-")[2]
    if unit not in units:
        keys.skip(key, f"a plan counts steps, and of how many {unit} the file does not say")
        return None
    found = keys.integer(key, 0)
    return None if found is None else -(-found // units[unit])


def _optimizer(keys: ForeignKeys, steps: int, units: Mapping[str, int]) -> dict[str, Any]:
    name = keys.choice("optimizer", {"adam": "adamw", "sgd": "sgd", "muon": "", "dist_muon": ""})
    if name == "":
        keys.mark_untranslated("optimizer", "a plan trains with adamw or sgd; adamw was taken")
    name = name or "adamw"
    first = ("sgd-momentum", 0.9) if name == "sgd" else ("adam-beta1", 0.9)
    found: dict[str, Any] = {"name": name}
    defaults = {
        "beta1": first,
        "beta2": ("adam-beta2", 0.999),
        "epsilon": ("adam-eps", 1e-8),
        "weight_decay": ("weight-decay", 0.01),
    }
    for field, (key, default) in defaults.items():
        value = keys.number(key, 0)
        if value is None:
            value = keys.assume(f"training.optimizer.{field}", default, "Megatron's default")
        found[field] = value
    clip = keys.number("clip-grad", 0)
    found["clip"] = (
        keys.assume("training.optimizer.clip", 1.0, "Megatron's default")
        if clip is None
        else clip or None
    )
    _master(keys)
    return found | _moments(keys) | _schedule(keys, steps, units)


def _moments(keys: ForeignKeys) -> dict[str, str]:
    """Dtype of the moments, which --use-precision-aware-optimizer lets one choose."""
    kinds = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    first, second = keys.choice("exp-avg-dtype", kinds), keys.choice("exp-avg-sq-dtype", kinds)
    aware = keys.flag("use-precision-aware-optimizer")
    if (first, second) == ("bf16", "bf16") and aware:
        return {"moments": "bf16"}
    for key, kind in (("exp-avg-dtype", first), ("exp-avg-sq-dtype", second)):
        if kind not in (None, "fp32"):
            keys.mark_untranslated(key, "a plan's moments are both of one dtype; fp32 was taken")
    return {"moments": "fp32"}


def _master(keys: ForeignKeys) -> None:
    """Tell master weights that are not fp32, which is all that a plan knows beside 16-bit
    parameters.
    """
    if keys.choice("main-params-dtype", {"fp32": "fp32", "fp16": "fp16"}) == "fp16":
        keys.mark_untranslated(
            "main-params-dtype",
            "a plan's master weights (training.optimizer.master) are fp32; fp32 was taken",
        )


def _schedule(keys: ForeignKeys, steps: int, units: Mapping[str, int]) -> dict[str, Any]:
    decay = keys.choice("lr-decay-style", _DECAYS)
    if decay == "":
        keys.mark_untranslated(
            "lr-decay-style", "a plan decays constantly, linearly or by a cosine; linear was taken"
        )
    if decay is None:
        keys.assume("training.optimizer.decay", "linear", "Megatron's default")
    over = _decay_steps(keys, steps, units)
    found: dict[str, Any] = {
        "decay": decay or "linear",
        "warmup_steps": _warmup(keys, steps, over, units),
    }
    rate, least = keys.number("lr", 0), keys.number("min-lr", 0) or 0.0
    if rate is None:
        rate = 3e-4
        keys.assume(
            "training.optimizer.learning_rate", rate, "Megatron requires --lr; the plan's default"
        )
    if least > rate:
        raise refuse("--min-lr", f"is {least:g}, above --lr {rate:g}; legal: 0 to {rate:g}")
    # Twelve digits: 3e-5 / 3e-4 is meant as 0.1.
    found["final_ratio"] = float(f"{least / rate:.12g}") if rate else 0.0
    return {**found, "learning_rate": rate}


def _decay_steps(keys: ForeignKeys, steps: int, units: Mapping[str, int]) -> float:
    """Steps over which Megatron decays, of which --lr-warmup-fraction is a share; the run's where
    it does not say.
    """
    found: float = steps
    sizes = {f"lr-decay-{unit}": size for unit, size in ({"iters": 1} | dict(units)).items()}
    for key, size in sizes.items():
        over = keys.integer(key)
        if over is not None:
            found = over / size
            if over // size != steps:
                keys.mark_untranslated(key, f"a plan decays over all its steps, {steps}")
    return found


def _warmup(keys: ForeignKeys, steps: int, over: float, units: Mapping[str, int]) -> int:
    older, whole = keys.number("warmup", 0, 1), keys.integer("lr-warmup-iters", 0)
    share = keys.number("lr-warmup-fraction", 0, 1) if "lr-warmup-fraction" in keys else older
    counted = {
        unit: _in_steps(keys, f"lr-warmup-{unit}", units)
        for unit in ("tokens", "samples")
        if f"lr-warmup-{unit}" in keys
    }
    unit = next((unit for unit, found in counted.items() if found), "samples")
    if share is not None and whole:
        raise refuse(
            "--lr-warmup-fraction", "is given beside --lr-warmup-iters; legal: one of them"
        )
    found = whole or round((share or 0) * over) or counted.get(unit) or 0
    if found > steps:
        shares = "warmup" if older is not None else "lr-warmup-fraction"
        key = "lr-warmup-iters" if whole else shares if share else f"lr-warmup-{unit}"
        keys.mark_untranslated(
            key, f"a plan warms up within its steps; {steps} were taken, of {found}"
        )
    return min(found, steps)


def _evaluation(keys: ForeignKeys) -> dict[str, int]:
    batches, every = keys.integer("eval-iters", -1), keys.integer("eval-interval", 0)
    if batches is None:
        batches = int(keys.assume("training.evaluation.batches", 100, "Megatron's default"))
    if every is None and batches:
        every = int(keys.assume("training.evaluation.every", 1000, "Megatron's default"))
    return (
        {"every": every or 1000, "batches": batches} if batches > 0 and every != 0 else {"every": 0}
    )


def _seed(keys: ForeignKeys) -> int:
    seed = keys.integer("seed", 0)
    return int(keys.assume("training.seed", 1234, "Megatron's default")) if seed is None else seed


def _checkpoint(keys: ForeignKeys) -> dict[str, Any]:
    every = keys.integer("save-interval", 0)
    save = keys.skip("save", "a run keeps its checkpoints in its own directory")
    why = "where this job left off, or a shell variable; a plan names a checkpoint to start from"
    if keys.is_undecided("load"):
        keys.skip("load", why)
    load = keys.text("load")
    if load is not None and ("$" in load or load == save):
        keys.mark_untranslated("load", why)
        load = None
    if every:
        keys.assume("checkpoint.keep", DEFAULT, KEEPS_ALL)
    return {"every": every or 0, **_asynchronous(keys, every)} | (
        {} if load is None else {"load": load}
    )


def _asynchronous(keys: ForeignKeys, every: int | None) -> dict[str, bool]:
    """Whether steps go on while a checkpoint is written, which Megatron does only with
    --async-save.
    """
    said = bool(keys.flag("async-save"))
    return {"asynchronous": said} if every or said else {}
