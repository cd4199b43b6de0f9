"""Split a model's linear layers over the tensor axis as a table says."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from workbench.models import Transformer
from workbench.models.transformer import Attention
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import GRADIENTS, SIDES, Mesh, MeshAxis
from workbench.parallel.tensor.column_parallel import ColumnLinear, Siblings
from workbench.parallel.tensor.grid.apply_grid import lay_over_grid
from workbench.parallel.tensor.row_parallel import RowLinear
from workbench.parallel.tensor.sequence_parallel import keep_own_positions, own_run, whole_indices
from workbench.parallel.tensor.shard_range import Cut
from workbench.parallel.tensor.vocab_parallel import VocabularyEmbedding, VocabularyHeadLoss
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import token_parts
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
"""Module pattern -> how it is split: column, row or vocabulary (1909.08053). What is not named is
replicated.

Attention's are never split through a head: `plan.heads` deals them.
"""

_DIM = {"column": 0, "vocabulary": 0, "row": 1}


def split_tensors(model: Transformer, layouts: dict[str, Layout], plan: Plan, mesh: Mesh) -> None:
    """Split a model on the meta device over the tensor ranks, in place, and record its parameters'
    new layouts.
    """
    axis, sequence = mesh["tensor"], plan.strategy.tensor.sequence
    if axis.size == 1:
        return
    if plan.strategy.tensor.algorithm != "1d":
        lay_over_grid(model, layouts, mesh, plan.strategy.tensor.algorithm)
        return
    split_modules(model, layouts, MEGATRON, axis, sequence)
    if sequence:
        model.indices = whole_indices(plan.training.sequence_length)
        model.here = partial(own_run, axis)
        if model.embedding is not None:
            model.embedding.register_forward_pre_hook(partial(keep_own_positions, axis))


def tensor_sums(
    layouts: Iterable[tuple[str, Layout]], plan: Plan, mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    """Local name -> the tensor axes over which a parameter's gradient is summed: those along which
    ranks hold the same parameter and meet different tokens.
    """
    found = (
        SIDES
        if plan.strategy.tensor.algorithm != "1d"
        else ("tensor",)
        if plan.strategy.tensor.sequence
        else ()
    )
    axes = [name for name in found if name in mesh.axes and mesh[name].size > 1]
    return {
        name: tuple(mesh[axis + GRADIENTS] for axis in axes if axis in layout.copies)
        for name, layout in layouts
    }


def boundary(plan: ResolvedPlan) -> tuple[int, int, int]:
    """What of a microbatch [B, T, D] one rank hands on to the next stage."""
    t, tensor = plan.training, plan.strategy.tensor
    if plan.code:  # one stage, which hands nothing on
        return 0, 0, 0
    tokens = t.sequence_length // plan.strategy.context.size
    if tensor.sequence:
        tokens //= tensor.ranks
    side = 1 if isinstance(tensor.size, int) else tensor.size[0]
    return (
        t.micro_batch // token_parts(tensor.algorithm, tensor.size),
        tokens,
        plan.shape.hidden // side,
    )


def counts_loss(mesh: Mesh) -> bool:
    """Whether this rank's loss is added to the job's: of the tensor ranks that have met the same
    tokens, the first.
    """
    return mesh["tensor.0" if "tensor.0" in mesh.axes else "tensor"].index == 0


def split_modules(
    model: Transformer,
    layouts: dict[str, Layout],
    table: dict[str, str],
    axis: MeshAxis,
    sequence: bool,
) -> None:
    """Narrow the modules of a model on the meta device, in place, and record their parameters' new
    layouts.
    """
    families: dict[str, Siblings] = {}
    for path, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in table.items() if fnmatchcase(path, pattern)), None)
        if kind is None:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        cut = _cut(model, parent, name, module.weight.shape[_DIM[kind]], axis)
        _narrow(path, module, layouts, kind, axis, cut)
        if kind == "column":
            if parent_path not in families:
                families[parent_path] = Siblings(parent, axis, sequence)
            own = ColumnLinear(module.weight, module.bias, axis, cut.piece, cut.pieces)
            setattr(parent, name, own)
            families[parent_path].layers.append(own)
        else:
            setattr(parent, name, _replacement(module, kind, axis, cut, sequence))


def _cut(model: Transformer, parent: nn.Module, name: str, length: int, axis: MeshAxis) -> Cut:
    return (
        Cut.heads(name, model.shape, axis)
        if isinstance(parent, Attention)
        else Cut.even(length, axis)
    )


def _narrow(
    path: str, module: nn.Module, layouts: dict[str, Layout], kind: str, axis: MeshAxis, cut: Cut
) -> None:
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if parameter is None or (kind == "row" and name == "bias"):
            continue
        key = f"{path}.{name}"
        if axis.name in layouts[key].copies:  # a tied weight is cut once
            layouts[key] = cut.of(layouts[key], _DIM[kind])
        own = torch.empty(layouts[key].local_shape, dtype=parameter.dtype, device="meta")
        setattr(module, name, nn.Parameter(own))


def _replacement(
    module: nn.Module, kind: str, axis: MeshAxis, cut: Cut, sequence: bool
) -> nn.Module:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if kind == "row":
        return RowLinear(weight, module.bias, axis, cut.kept, sequence)  # type: ignore[arg-type]
    vocabulary = VocabularyEmbedding if isinstance(module, nn.Embedding) else VocabularyHeadLoss
    return vocabulary(weight, (cut.start, cut.stop), axis, sequence)
