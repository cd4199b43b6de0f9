"""Batch, length, optimizer, evaluation and checkpoints of a trainer's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.trainer.arguments import LARGEST, Arguments
from workbench.interop.translation import DEFAULT, KEEPS_ALL, ImportOptions, lacks
from workbench.untrusted_text import shown

STEPS = 100
"""Steps of a plan that does not say them."""
_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_torch_npu_fused",
    "adamw",
    "paged_adamw",
    "paged_adamw_32bit",
)
_EIGHT_BITS = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "adamw_torch_8bit",
    "ao_adamw_8bit",
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"name": "adamw"} for name in _ADAMW},
    **{name: {"name": "adamw", "moments": "int8"} for name in _EIGHT_BITS},
    "sgd": {"name": "sgd"},
}
"""Optimizer of the Trainer -> the plan's fields; states of others are of another size."""
DECAYS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OTHER_DECAYS = (
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "warmup_stable_decay",
    "greedy",
    "one_cycle",
    "rex",
)
"""Schedules of the Trainer and of axolotl that a plan has not."""
_FIELDS = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
}
OPTIMIZER = "finetune.optimizer."


def batch(a: Arguments, data_ranks: int, pairs: bool) -> dict[str, int]:
    """Sequences of a rank and of a step; a pair of answers is two."""
    micro = a.integer("micro", "finetune.micro_batch")
    accumulation = _accumulation(a, micro)
    each = 2 if pairs else 1
    return {"micro_batch": each * micro, "global_batch": each * micro * accumulation * data_ranks}


def _accumulation(a: Arguments, micro: int) -> int:
    key = "gradient_accumulation_steps"
    if a.dialect.format == "axolotl" and not a.has(key):
        total = a.keys.integer("batch_size")  # of a rank: axolotl multiplies it by the ranks
        if total is not None:
            if total % micro:
                raise refuse("batch_size", f"is {total}, no multiple of micro_batch_size {micro}")
            return total // micro
    return a.integer(key, "finetune.global_batch")


def steps(a: Arguments, given: ImportOptions) -> int | None:
    """Steps of the run; None where the file counts epochs of rows that it does not hold."""
    key = a.key("epochs")
    found, epochs = a.keys.integer(a.key("max_steps"), -1), a.keys.number(key, 0, LARGEST)
    above = "max_steps stands above it"
    for field in ("training.steps", "finetune.steps"):
        if (found or 0) <= 0 and isinstance(given.sets.get(field), int):
            found, above = int(given.sets[field]), f"{field} is set beside the file"
    if found is not None and found > 0:
        if epochs is not None:
            a.keys.mark_untranslated(key, above)
        return found
    count = a.default("epochs") if epochs is None else epochs
    a.keys.assume(
        "finetune.steps",
        DEFAULT,
        f"the file says {count:g} epochs of rows that it does not count; the plan's default: give "
        "--set finetune.steps=N",
    )
    return None


def optimizer(a: Arguments, length: int | None) -> dict[str, Any]:
    """The plan's `optimizer` section for a run of `length` steps."""
    found = _kind(a)
    for meaning, field in _FIELDS.items():
        if found["name"] == "sgd" and meaning.startswith("adam_"):
            continue
        found[field] = a.number(meaning, OPTIMIZER + field)
    if found["name"] == "sgd":
        found["beta1"] = a.keys.assume(f"{OPTIMIZER}beta1", 0.0, "torch's default of SGD: momentum")
    clip = a.number("max_grad_norm", f"{OPTIMIZER}clip")
    found["clip"] = clip or None
    said = {key: value for key, value in found.items() if value != DEFAULT}
    return said | _schedule(a, length, said.get("learning_rate"))


def _kind(a: Arguments) -> dict[str, Any]:
    key = a.key("optim")
    said = a.word("optim") or "adamw_torch"
    if not a.has("optim"):
        a.assume(f"{OPTIMIZER}name", "adamw", "optim")
    if said not in OPTIMIZERS:
        raise refuse(
            key,
            f"is {shown(said)}, whose states are not those of AdamW or SGD, which a plan trains "
            f"with; legal: {', '.join(OPTIMIZERS)}",
        )
    if said.startswith("paged") and a.has("optim"):
        a.keys.mark_untranslated(
            key, "paged: states go to host memory where the GPU is full; an estimate keeps them"
        )
    return dict(OPTIMIZERS[said])


def _schedule(a: Arguments, length: int | None, rate: float | None) -> dict[str, Any]:
    key = a.key("lr_scheduler_type")
    word = a.word("lr_scheduler_type") or "linear"
    if not a.has("lr_scheduler_type"):
        a.assume(f"{OPTIMIZER}decay", DECAYS.get(word, word), "lr_scheduler_type")
    if word not in (*DECAYS, *_OTHER_DECAYS):
        raise refuse(key, f"is {shown(word)}; legal: {', '.join((*DECAYS, *_OTHER_DECAYS))}")
    if word not in DECAYS:
        a.keys.mark_untranslated(
            key, "a plan decays constantly, linearly or by a cosine; cosine was taken"
        )
    decay = DECAYS.get(word, "cosine")
    found: dict[str, Any] = {"decay": decay, "warmup_steps": _warmup(a, length)}
    if word == "constant":
        found["warmup_steps"] = 0
    return found | ({} if decay == "constant" else {"final_ratio": _end(a, word, rate)})


def _end(a: Arguments, word: str, rate: float | None) -> float:
    """The share of the peak that the rate falls to: 0 but for a cosine with a least rate."""
    least = "lr_scheduler_kwargs.min_lr"
    if "min_lr" not in word:
        return a.keys.number("cosine_min_lr_ratio", 0, 1) or 0.0
    share, value = a.keys.number(f"{least}_rate", 0, 1), a.keys.number(least, 0, LARGEST)
    if share is None and value is not None and rate:
        return min(1.0, value / rate)
    return share or 0.0


def _warmup(a: Arguments, length: int | None) -> int:
    """Steps of the warm-up; a number below 1, and `warmup_ratio`, are shares of the run."""
    run = length or STEPS
    found, ratio = a.keys.number("warmup_steps", 0, LARGEST), a.keys.number("warmup_ratio", 0, 1)
    if found and ratio and a.keys.has_key("warmup_ratio"):
        a.keys.mark_untranslated("warmup_ratio", "warmup_steps stands above it")
    field = f"{OPTIMIZER}warmup_steps"
    if not found and ratio:
        found = ratio
    if found is None:
        usual = min(int(0.03 * run), 100) if a.dialect.format == "axolotl" else 0
        return int(a.assume(field, usual, "warmup_steps"))
    count = math.ceil(found * run) if 0 < found < 1 else int(found)
    if found >= 1 and length is None and count > run:
        raise lacks(
            "finetune.steps",
            f"the file counts epochs and no steps, and the warm-up takes {count} steps; give --set "
            f"finetune.steps=N, N at least {count}",
            {"finetune.steps": count},
        )
    return count


def evaluation(a: Arguments, length: int | None) -> dict[str, Any]:
    """How often held-out loss is computed, where the file says so in steps."""
    key, every = a.key("evaluation"), None
    strategy = a.keys.choice(key, {name: name for name in ("no", "steps", "epoch", "false")})
    if strategy == "epoch":
        a.keys.mark_untranslated(key, "steps of an epoch are not in the file")
    if strategy == "steps" or (strategy is None and a.dialect.format == "axolotl"):
        every = _every(a, "eval_steps", length)
    return {"evaluation": {"every": every}} if every else {}


def checkpoint(a: Arguments, length: int | None) -> dict[str, Any]:
    """The plan's `checkpoint` section."""
    strategy = a.keys.choice(
        "save_strategy", {name: name for name in ("no", "steps", "epoch", "best", "false")}
    )
    if strategy in ("epoch", "best"):
        a.keys.mark_untranslated(
            "save_strategy", "steps of an epoch are not in the file; the last step is saved"
        )
    if strategy in ("no", "false", "epoch", "best"):
        return {"every": 0}
    every = _every(a, "save_steps", length)
    if every is None and strategy is None and a.dialect.format == "axolotl":
        why = "axolotl saves once an epoch, or saves_per_epoch, whose steps are not in the file"
        return {"every": a.keys.assume("checkpoint.every", 0, f"{why}; the last step is saved")}
    if every is None:
        every = int(a.assume("checkpoint.every", a.default("save_steps") or 500, "save_steps"))
    keep = a.keys.integer("save_total_limit")
    if keep is None and every:
        a.keys.assume("checkpoint.keep", DEFAULT, KEEPS_ALL)
    return {"every": every} | ({} if keep is None else {"keep": keep})


def _every(a: Arguments, meaning: str, length: int | None) -> int | None:
    """A number of steps; a share of the run is one of its steps."""
    found = a.keys.number(a.key(meaning), 0, LARGEST)
    found = _share(a, meaning) or found
    if found is None or not 0 < found < 1:
        return None if found is None else int(found)
    return max(1, math.ceil(found * (length or STEPS)))


def _share(a: Arguments, meaning: str) -> float | None:
    """The share of the run that axolotl takes a number an epoch for; None where it takes none."""
    if a.dialect.format != "axolotl":
        return None
    saves = meaning == "save_steps"
    if not (saves or a.keys.value("val_set_size") or a.keys.value("test_datasets")):
        return None
    times = a.keys.number("saves_per_epoch" if saves else "evals_per_epoch", 0, LARGEST)
    count = (times or 0) * float(a.keys.value("num_epochs") or 1)
    return 1 / count if count > 1 else None


def trackers(a: Arguments, data: Mapping[str, Any]) -> list[str]:
    """Trackers that the run writes to, of those that a plan knows."""
    known = ("tensorboard", "wandb", "mlflow")
    said = a.keys.take("report_to")
    if not isinstance(said, str | list | None):
        raise refuse("report_to", f"is {shown(said)}; must be a name, or a list of names")
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    left = [name for name in names if name not in (*known, "none", "all")]
    if left:
        a.keys.mark_untranslated("report_to", f"a plan has no name for {shown(left[0])}")
    switches = {"tensorboard": "use_tensorboard", "wandb": "use_wandb", "mlflow": "use_mlflow"}
    on = [name for name in known if name in names or a.keys.flag(switches[name])]
    return on + [n for n in known[1:] if n not in on and data.get(f"{n}_project")]
