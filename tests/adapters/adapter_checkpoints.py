"""Checkpoints of adapters, as two ranks of fine-tuning write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.checkpoint.checkpoint_format import Shard, commit_checkpoint, write_rank_file
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora


def write_adapter_checkpoint(
    folder: Path,
    shape: Shape,
    values: dict[str, Tensor],
    lora: Lora,
    base_sha256: str | None = None,
    **tune: Any,
) -> Path:
    """The checkpoint of step 1 in a run directory `folder`."""
    writing, final = folder / "writing", folder / "checkpoints" / "step-00000001"
    writing.mkdir(parents=True)
    final.parent.mkdir()
    for rank in range(2):
        shards = [
            _part(name, kind, value, rank)
            for name, value in values.items()
            for kind in ("parameter", "moment1")
        ]
        write_rank_file(writing, rank, shards, lambda nbytes: None)
    trained = {"method": "lora", "lora": lora.model_dump(), "base_sha256": base_sha256, **tune}
    meta = {
        "sample_index": 8,
        "model": shape.model_dump(),
        "precision": "fp32",
        "optimizer": "adamw",
        "finetune": trained,
    }
    commit_checkpoint(writing, final, 2, meta)
    return final


def _part(name: str, kind: str, value: Tensor, rank: int) -> Shard:
    """A rank's rows of a tensor."""
    middle = value.shape[0] // 2
    rows = ((0, middle), (middle, value.shape[0]))[rank]
    slices = (rows, *((0, n) for n in value.shape[1:]))
    return Shard(name, kind, value[slice(*rows)], tuple(value.shape), slices)
