"""Adapters that fine-tuning goes on from: `finetune.lora.initial`."""

from __future__ import annotations

import math
from pathlib import Path

from workbench.adapters.peft_folder import read_peft_folder
from workbench.checkpoint.tensor_index import TensorSource
from workbench.errors import refuse
from workbench.plan.catalog.families.family import Family
from workbench.plan.model.block_linears import adapted_linears, adapter_scale
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora

FIELD = "finetune.lora.initial"


def initial_adapters(folder: Path, family: Family, shape: Shape, lora: Lora) -> TensorSource:
    """Index of the adapters of a PEFT folder, which are to be those that a plan trains.

    Args:
        folder: The folder.
        family: The family whose names the base model has.
        shape: The model.
        lora: The plan's.

    Raises:
        PlanError: The folder is not read, or has other adapters; names the field that differs.
    """
    found, wanted = read_peft_folder(folder, family, shape, FIELD), adapted_linears(shape, lora)
    if found.replaced:
        raise refuse(
            FIELD,
            f"'{folder}' holds {found.replaced[0]} complete, which is frozen here; legal: adapters "
            "without modules_to_save and bias",
        )
    if differing := sorted(found.ranks.keys() ^ wanted.keys()):
        own = "has" if differing[0] in found.ranks else "lacks"
        raise refuse(
            "finetune.lora.targets",
            f"is {lora.targets}; '{folder}' {own} adapters of {differing[0]}; legal: the layers "
            f"that it has adapters of",
        )
    for name, rank in found.ranks.items():
        if rank != lora.rank:
            raise refuse(
                "finetune.lora.rank",
                f"is {lora.rank}; '{folder}' has rank {rank} of {name}; legal: {rank}",
            )
        theirs, ours = found.scales[name], adapter_scale(lora)
        if not math.isclose(theirs, ours, rel_tol=1e-9):
            raise refuse(
                "finetune.lora.alpha",
                f"is {lora.alpha:g}, which scales adapters by {ours:g}; '{folder}' scales those of "
                f"{name} by {theirs:g}; legal: {lora.alpha * theirs / ours:g}",
            )
    return found.source
