"""Adapters that a checkpoint of fine-tuning holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from workbench.adapters.peft_names import adapted_names
from workbench.checkpoint.manifest import MANIFEST, REMEDY
from workbench.checkpoint.resume_point import checkpoint_shape
from workbench.checkpoint.tensor_index import TensorSource
from workbench.plan.model.block_linears import adapter_scale
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Finetune, Lora, Plan


@dataclass(frozen=True)
class TrainedAdapters:
    """Adapters of a checkpoint.

    Attributes:
        source: The checkpoint: `NAME.lora_a` and `NAME.lora_b`.
        shape: The model.
        tune: What was trained, and of which base.
    """

    source: TensorSource
    shape: Shape
    tune: Finetune

    @property
    def lora(self) -> Lora:
        """Rank, alpha, and how they are scaled."""
        return self.tune.lora or Lora()

    @property
    def names(self) -> list[str]:
        """Projections that have adapters."""
        return adapted_names(name for name, kind in self.source.tensors if kind == "parameter")

    @property
    def scales(self) -> dict[str, float]:
        """Projection -> scale."""
        return dict.fromkeys(self.names, adapter_scale(self.lora))


def trained_adapters(source: TensorSource) -> TrainedAdapters:
    """The adapters of a checkpoint for which `holds_adapters`.

    Raises:
        ValueError: Its manifest does not say what was trained.
    """
    folder = source.folder
    try:
        tune = Finetune.model_validate(source.meta["finetune"])
    except ValidationError:
        raise ValueError(
            f"{folder / MANIFEST} is damaged: its meta does not say what finetune trained; {REMEDY}"
        ) from None
    found = TrainedAdapters(source, checkpoint_shape(folder, dict(source.meta)), tune)
    if not found.names:
        raise ValueError(f"{folder} holds no adapters; {REMEDY}")
    return found


def base_of_run(checkpoint: Path) -> str | None:
    """`finetune.base` of the run that wrote a checkpoint, if its plan is still beside it."""
    plan = checkpoint.parent.parent / "plan.yaml"
    tune = Plan.load(plan).finetune if plan.is_file() else None
    return None if tune is None else tune.base
