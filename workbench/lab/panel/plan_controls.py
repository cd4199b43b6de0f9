"""The fields of a plan that the planner's panel sets: what each is called, its group, and the form
of its control.

What a field means comes from its description in the schema, and the choices of a named value from
its type there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal, get_args

from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.plan.catalog import catalog
from workbench.plan.schema import AXES, Plan, Training
from workbench.schedules.generators import SCHEDULES

Choice = tuple[str, Any]
"""What a choice is called, and its value."""
Form = Literal["choice", "size", "switch", "number", "text"]
"""size: ranks along an axis, out of those that are legal; text: several kinds of value, as a plan
file has them.
"""


@dataclass(frozen=True)
class PlanControl:
    """One control: the field it sets, what it is called, its group ("" is always in sight) and its
    form.
    """

    name: str
    path: str
    label: str
    group: str
    form: Form
    hint: str
    choices: tuple[Choice, ...] = ()
    """Those that do not depend on the plan."""
    integral: bool = True
    """Whether a number has no fraction."""
    required: bool = False
    """Whether a plan cannot leave it out."""


CONTROL_ROWS: dict[str, tuple[tuple[str, str, str, Form], ...]] = {
    "": (
        ("model", "model", "Model", "choice"),
        ("gpu", "cluster.gpu", "GPU", "choice"),
        ("gpus", "cluster.gpus", "Number of GPUs", "number"),
        ("strategy", "strategy.preset", "Strategy", "choice"),
        ("tensor", "strategy.tensor.size", "Tensor parallel", "size"),
        ("pipeline", "strategy.pipeline.size", "Pipeline stages", "size"),
        ("zero", "strategy.data.zero", "ZeRO stage", "choice"),
        ("recompute", "strategy.recompute", "Recompute", "choice"),
        ("sequence_length", "training.sequence_length", "Sequence length", "number"),
        ("micro_batch", "training.micro_batch", "Micro batch", "number"),
        ("global_batch", "training.global_batch", "Global batch", "number"),
        ("precision", "strategy.precision", "Precision", "choice"),
    ),
    "Cluster": (
        ("nodes", "cluster.nodes", "Nodes", "number"),
        ("gpus_per_node", "cluster.gpus_per_node", "GPUs per node", "number"),
        ("fabric", "cluster.fabric", "Fabric", "choice"),
        ("calibration", "cluster.calibration", "Calibration file", "text"),
    ),
    "Pipeline schedule": (
        ("schedule", "strategy.pipeline.schedule", "Schedule", "choice"),
        ("chunks", "strategy.pipeline.chunks", "Chunks", "number"),
        ("partition", "strategy.pipeline.partition", "Partition", "text"),
    ),
    "Tensor and sequence parallel": (
        ("algorithm", "strategy.tensor.algorithm", "Tensor algorithm", "choice"),
        ("sequence_parallel", "strategy.tensor.sequence", "Sequence parallel", "switch"),
    ),
    "Context, experts and placement": (
        ("context", "strategy.context.size", "Context parallel", "size"),
        ("context_algorithm", "strategy.context.algorithm", "Context algorithm", "choice"),
        ("ulysses_size", "strategy.context.ulysses_size", "Ulysses size (USP)", "number"),
        ("experts", "strategy.expert.size", "Expert parallel", "size"),
        ("placement", "strategy.placement", "Placement, innermost first", "choice"),
    ),
    "Data parallel and offload": (
        ("shard", "strategy.data.shard", "Shard group", "choice"),
        ("offload", "strategy.data.offload", "Offload", "choice"),
        ("reduce", "strategy.data.reduce", "Gradient reduction", "choice"),
        ("bucket", "strategy.data.bucket_mib", "Bucket (MiB)", "number"),
        ("overlap", "strategy.data.overlap", "Overlap communication", "switch"),
        ("keep_gathered", "strategy.data.keep_gathered", "Keep gathered parameters", "switch"),
    ),
    "Kernels, gradients and optimizer": (
        ("attention", "strategy.attention", "Attention", "choice"),
        ("kernels", "strategy.kernels", "Kernels", "choice"),
        ("head_loss", "strategy.loss", "Loss", "choice"),
        ("gradient_dtype", "strategy.gradient_dtype", "Gradient dtype", "choice"),
        ("optimizer", "training.optimizer.name", "Optimizer", "choice"),
        ("moments", "training.optimizer.moments", "Moments", "choice"),
        ("master", "training.optimizer.master", "Master weights", "choice"),
        ("learning_rate", "training.optimizer.learning_rate", "Learning rate", "number"),
    ),
    "Fine-tuning": (
        ("method", "finetune.method", "Method", "choice"),
        ("base", "finetune.base", "Base weights", "text"),
        ("lora_rank", "finetune.lora.rank", "LoRA rank", "number"),
        ("lora_alpha", "finetune.lora.alpha", "LoRA alpha", "number"),
        ("lora_targets", "finetune.lora.targets", "LoRA targets", "text"),
        ("base_format", "finetune.quantize.format", "4-bit base", "choice"),
        ("base_group", "finetune.quantize.group", "4-bit group", "choice"),
        ("preference_beta", "finetune.preference.beta", "DPO beta", "number"),
    ),
}
"""Group -> (name, field, label, form) of its controls."""


@lru_cache(maxsize=1)
def plan_controls() -> dict[str, PlanControl]:
    """All controls by name, in order."""
    return {
        row[0]: _make_control(group, *row) for group, rows in CONTROL_ROWS.items() for row in rows
    }


def _make_control(group: str, name: str, path: str, label: str, form: Form) -> PlanControl:
    found = schema_field(path)
    whole = "float" not in str(found.annotation)
    hint = f"{path}: {found.description}"
    return PlanControl(
        name,
        path,
        label,
        group,
        form,
        hint,
        _choices(name, found),
        whole,
        name in ("model", "gpu", "gpus"),
    )


def schema_field(path: str) -> Any:
    """The schema's field at a dotted path, as pydantic describes it."""
    at: Any = Plan
    for name in path.split("."):
        found = at.model_fields[name]
        at = _section_of(found.annotation)
    return found


def _section_of(annotation: Any) -> Any:
    """The fields that a field holds, which may be one of several kinds of value."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), GPU)


def _choices(name: str, field: Any) -> tuple[Choice, ...]:
    zero = (
        ("0 · nothing sharded", 0),
        ("1 · optimizer", 1),
        ("2 · + gradients", 2),
        ("3 · + parameters", 3),
    )
    presets = tuple(
        (f"{key} · {preset.title}", key) for key, preset in catalog.strategies().items()
    )
    named: dict[str, tuple[Choice, ...]] = {
        "model": choices_of(*catalog.models()),
        "gpu": choices_of("local", *gpu_catalog.gpus()),
        "strategy": presets,
        "zero": zero,
        "fabric": (("auto", None), *choices_of(*gpu_catalog.clusters())),
        "schedule": choices_of(*SCHEDULES),
        "placement": tuple((" · ".join(order), list(order)) for order in permutations(AXES)),
        "method": (("none: pre-training", None), *choices_of("full", "lora")),
        "base_format": (("none: 16 bits", None), *choices_of("nf4", "int4")),
    }
    return named.get(name) or choices_of(*_literals(field.annotation))


def _literals(annotation: Any) -> list[Any]:
    """The names that a type allows, through unions."""
    found: list[Any] = []
    for part in get_args(annotation):
        found += (
            [part]
            if isinstance(part, str | int) and not isinstance(part, bool)
            else _literals(part)
        )
    return found


def choices_of(*values: Any) -> tuple[Choice, ...]:
    """Choices called as they are written."""
    return tuple((str(value), value) for value in dict.fromkeys(values))


def panel_path(field: str) -> str:
    """A field as a control names it: what a fine-tuning shares with training is `training`'s."""
    section, _, name = field.partition(".")
    shared = section == "finetune" and name.split(".")[0] in Training.model_fields
    return f"training.{name}" if shared else field
