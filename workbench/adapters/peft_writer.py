"""Writing of adapters as a folder that `peft.PeftModel.from_pretrained` loads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.adapters.lora_linear import LORA_A, LORA_B
from workbench.adapters.peft_names import (
    PREFIX,
    THEIRS,
    WEIGHT,
    FusedRows,
    PeftModule,
    adapter_parts,
    peft_modules,
)
from workbench.checkpoint.checkpoint_format import write_atomically
from workbench.checkpoint.huggingface.huggingface_names import stored_parts
from workbench.checkpoint.resume_point import ADAPTER_CONFIG
from workbench.checkpoint.safetensors_writer import TensorEntry, write_safetensors
from workbench.errors import refuse
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.stored_parts import StoredPart
from workbench.plan.model.block_linears import adapter_scale
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora

ADAPTER_WEIGHTS = "adapter_model.safetensors"
EXPERT_BRANCHES = ("gate", "up")
"""Projections of experts that transformers fuses, which PEFT therefore adapts together."""


@dataclass(frozen=True)
class _Pair:
    """The adapters of one module of transformers."""

    module: PeftModule
    chosen: list[FusedRows]
    rank: int
    parts: dict[str, list[StoredPart]]


def write_peft_folder(
    folder: Path,
    family: Family,
    shape: Shape,
    lora: Lora,
    names: Iterable[str],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    base: str | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Any]:
    """Write adapters under PEFT's names.

    Args:
        folder: An existing folder.
        family: The family whose names the modules have.
        shape: The model.
        lora: Rank, alpha, dropout, and how they are scaled.
        names: Projections that have adapters.
        dtype: Of the adapters.
        read: Name with `lora_a` or `lora_b` -> value.
        base: Where the base model is, for `base_model_name_or_path`.
        wrote: Called with the bytes of each block written.

    Returns:
        Files, tensors, parameters, bytes and dtype written.

    Raises:
        PlanError: PEFT cannot express which projections have adapters; names them.
        OSError: The disk refuses.
    """
    modules, names = peft_modules(family, shape), list(names)
    pairs = _pairs(modules, names, lora.rank)
    _refuse_inexpressible(family, modules, pairs)
    entries, of_key = [], {}
    for pair in pairs:
        key = f"{PREFIX}{pair.module.name}."
        for leaf, extent in (
            (LORA_A, (pair.rank, pair.module.inputs)),
            (LORA_B, (pair.module.outputs, pair.rank)),
        ):
            entries.append(TensorEntry(key + THEIRS[leaf], dtype, extent))
            of_key[key + THEIRS[leaf]] = _of_leaf(pair.parts, leaf)

    extents = {entry.key: entry.shape for entry in entries}

    def made(key: str) -> Tensor:
        value = torch.zeros(extents[key], dtype=dtype)
        for name, part in of_key[key]:
            ours = read(name)[tuple(slice(*its) for its in part.ours)]
            target = value[tuple(slice(*its) for its in part.theirs)]
            target.copy_(ours.reshape(target.shape))
        return value

    size, _ = write_safetensors(folder / ADAPTER_WEIGHTS, entries, made, wrote)
    config = adapter_config(family, shape, lora, pairs, base)
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
    return {
        "files": [ADAPTER_CONFIG, ADAPTER_WEIGHTS],
        "tensors": len(entries),
        "parameters": sum(math.prod(entry.shape) for entry in entries),
        "bytes": size,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _pairs(modules: Mapping[str, PeftModule], names: list[str], rank: int) -> list[_Pair]:
    found = []
    for module in modules.values():
        if chosen := module.chosen(names):
            parts = adapter_parts(module, chosen, rank, block=True)
            found.append(_Pair(module, chosen, rank * len(chosen), parts))
    return found


def _of_leaf(parts: dict[str, list[StoredPart]], leaf: str) -> list[tuple[str, StoredPart]]:
    return [(name, part) for name, own in parts.items() if name.endswith(leaf) for part in own]


def adapter_config(
    family: Family, shape: Shape, lora: Lora, pairs: list[_Pair], base: str | None
) -> dict[str, Any]:
    """Content of adapter_config.json."""
    if lora.rslora and any(one.expert is not None for pair in pairs for one in pair.chosen):
        # PEFT 0.21 doubles rank and alpha of experts that it fuses, which keeps alpha / rank alone.
        scale = adapter_scale(lora)
        lora = lora.model_copy(update={"alpha": scale * lora.rank, "rslora": False})
    parts = stored_parts(family, shape)
    everything = {part.key.rpartition(".")[0] for own in parts.values() for part in own}
    adapted = {pair.module.name: pair for pair in pairs}
    short = {name: _shortest(name, adapted.keys(), everything) for name in adapted}
    fused = {short[pair.module.name]: len(pair.chosen) for pair in pairs if len(pair.chosen) > 1}
    grown = {
        name: lora.alpha * (math.sqrt(count) if lora.rslora else count)
        for name, count in fused.items()
    }
    weights = [part for own in parts.values() for part in own if part.key.endswith(WEIGHT)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted(set(short.values())),
        "rank_pattern": {name: lora.rank * count for name, count in fused.items()},
        "alpha_pattern": {name: _plain(alpha) for name, alpha in grown.items()},
        "fan_in_fan_out": any(part.transposed for part in weights),
        "bias": "none",
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "init_lora_weights": True,
        "use_dora": False,
        "inference_mode": True,
        "revision": None,
    }


def _plain(alpha: float) -> float | int:
    return int(alpha) if float(alpha).is_integer() else alpha


def _shortest(name: str, adapted: Iterable[str], everything: Iterable[str]) -> str:
    """The shortest end of a module's name that only modules with adapters have."""
    others, words = set(everything) - set(adapted), name.split(".")
    for count in range(1, len(words)):
        end = ".".join(words[-count:])
        if not end.isdigit() and not any(f".{other}".endswith(f".{end}") for other in others):
            return end
    return name


def _refuse_inexpressible(
    family: Family, modules: Mapping[str, PeftModule], pairs: list[_Pair]
) -> None:
    """Refuse adapters of some projections of fused experts, and beside experts of dense layers.

    transformers 5 holds all experts of a layer in one parameter, gate beside up, and PEFT finds
    them by the last word of their names, which those of dense and shared layers have too.
    """
    experts = [one for one in modules.values() if one.projections[0].expert is not None]
    names = {one.name for pair in pairs for one in pair.chosen if one.expert is not None}
    for layer in sorted({name.rpartition(".")[0] for name in names}):
        if len(has := [one for one in EXPERT_BRANCHES if f"{layer}.{one}" in names]) == 1:
            raise refuse(
                "finetune.lora.targets",
                f"has {layer}.{has[0]} alone, and PEFT adapts gate and up of experts together; "
                "legal: both, or neither",
            )
    ends = {one.name.rpartition(".")[2] for one in experts}
    for pair in pairs:
        if pair.chosen[0].expert is None and pair.module.name.rpartition(".")[2] in ends:
            raise refuse(
                "finetune.lora.targets",
                f"has {pair.chosen[0].name}, which PEFT cannot tell from experts in "
                f"{family.classes}; legal: without it, or merged weights",
            )
