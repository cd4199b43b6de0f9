"""Split a model's linear layers over the tensor axis as a table says."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.models.transformer import Attention
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.tensor.collectives import copy_to
from workbench.parallel.tensor.linear import ColumnLinear, RowLinear
from workbench.parallel.tensor.sequence import Entrance, keep_own_positions, own_run, whole_indices
from workbench.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHeadLoss
from workbench.plan.heads import dealt
from workbench.plan.schema import Plan

MEGATRON = {
    "embedding.tokens": "vocabulary",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.o": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "vocabulary",
}
"""Module pattern -> how it is split: column, row or vocabulary (1909.08053). What is not named is replicated.

Attention's are never split through a head: `plan.heads` deals them.
"""

_DIM = {"column": 0, "vocabulary": 0, "row": 1}


class Cut(NamedTuple):
    """What a rank keeps of a split dim: [start, stop), room for more that stays zero, and which piece of how many."""

    kept: tuple[int, int]
    room: int
    piece: int
    pieces: int


def split_tensors(model: Transformer, layouts: dict[str, Layout], plan: Plan, mesh: Mesh) -> None:
    """Split a model on the meta device over the tensor ranks, in place, and record its parameters' new layouts."""
    axis, sequence = mesh["tensor"], plan.strategy.tensor.sequence
    if axis.size == 1:
        return
    split_modules(model, layouts, MEGATRON, axis, sequence)
    if sequence:
        model.indices = whole_indices(plan.training.sequence_length)
        model.here = partial(own_run, axis)
        if model.embedding is not None:
            model.embedding.register_forward_pre_hook(partial(keep_own_positions, axis))


def tensor_sums(layouts: Iterable[tuple[str, Layout]], plan: Plan, mesh: Mesh) -> dict[str, tuple[MeshAxis, ...]]:
    """Local name -> the tensor axes over which a parameter's gradient is summed: those along which ranks hold the same
    parameter and meet different tokens."""
    axes = (mesh["tensor"],) if plan.strategy.tensor.sequence and mesh["tensor"].size > 1 else ()
    return {name: tuple(axis for axis in axes if axis.name in layout.copies) for name, layout in layouts}


def boundary(plan: Plan) -> tuple[int, int, int]:
    """What of a microbatch [B, T, D] one rank hands on to the next stage."""
    t, tensor = plan.training, plan.strategy.tensor
    tokens = t.sequence_length // plan.strategy.context.size
    return t.micro_batch, tokens // tensor.ranks if tensor.sequence else tokens, plan.shape.hidden


def split_modules(
    model: Transformer, layouts: dict[str, Layout], table: dict[str, str], axis: MeshAxis, sequence: bool
) -> None:
    """Narrow the modules of a model on the meta device, in place, and record their parameters' new layouts."""
    entrances: dict[str, Entrance | None] = {}
    for path, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in table.items() if fnmatchcase(path, pattern)), None)
        if kind is None:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        cut = _cut(model, parent, name, module.weight.shape[_DIM[kind]], axis)
        _narrow(path, module, layouts, kind, axis, cut)
        if kind == "column":
            if parent_path not in entrances:
                entrances[parent_path] = _enter(parent, axis, sequence)
            if sequence or cut.pieces < axis.size:
                own = ColumnLinear(module.weight, module.bias, axis, cut.piece, cut.pieces, entrances[parent_path])
                setattr(parent, name, own)
        else:
            setattr(parent, name, _replacement(module, kind, axis, cut, sequence))


def _enter(parent: nn.Module, axis: MeshAxis, sequence: bool) -> Entrance | None:
    """Column-split siblings share one input: one gather or sum serves them all."""
    if not sequence:
        parent.register_forward_pre_hook(partial(_copied, axis))
        return None
    entrance = Entrance(axis)
    entrance.attach(parent)
    return entrance


def _copied(axis: MeshAxis, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return copy_to(inputs[0], axis), *inputs[1:]


def _cut(model: Transformer, parent: nn.Module, name: str, length: int, axis: MeshAxis) -> Cut:
    if not isinstance(parent, Attention):
        room = -(-length // axis.size)
        start = min(axis.index * room, length)
        return Cut((start, min(start + room, length)), room, axis.index, axis.size)
    heads, width = dealt(model.shape, axis.size, axis.index), parent.head_dim
    (start, stop), room = (heads.kv, heads.kv_room) if name in ("k", "v") else (heads.query, heads.room)
    pieces = (heads.piece, heads.pieces) if name in ("k", "v") else (axis.index, axis.size)
    return Cut((start * width, stop * width), room * width, *pieces)


def _narrow(path: str, module: nn.Module, layouts: dict[str, Layout], kind: str, axis: MeshAxis, cut: Cut) -> None:
    again = cut.pieces < axis.size and cut.piece < cut.pieces and axis.index % (axis.size // cut.pieces) > 0
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if parameter is None or (kind == "row" and name == "bias"):
            continue
        key = f"{path}.{name}"
        if axis.name in layouts[key].copies:  # a tied weight is cut once
            layouts[key] = layouts[key].cut(_DIM[kind], axis, cut.kept, cut.room, replica=again)
        own = torch.empty(layouts[key].local_shape, dtype=parameter.dtype, device="meta")
        setattr(module, name, nn.Parameter(own))


def _replacement(module: nn.Module, kind: str, axis: MeshAxis, cut: Cut, sequence: bool) -> nn.Module:
    weight, num_kept = module.weight, cut.kept[1] - cut.kept[0]
    assert isinstance(weight, nn.Parameter)
    if kind == "row":
        return RowLinear(weight, module.bias, axis, num_kept, sequence)  # type: ignore[arg-type]
    vocabulary = VocabularyEmbedding if isinstance(module, nn.Embedding) else VocabularyHeadLoss
    return vocabulary(weight, cut.kept, axis, sequence)
