"""Apply tensor parallelism: column-, row- and vocabulary-parallel modules over the tensor axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from workbench.models import Transformer
from workbench.models.attention.latent_attention import LatentAttention
from workbench.models.block import AnyAttention
from workbench.models.seams import AddNorm, HeadLoss
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import GRADIENT_GROUP_SUFFIX, GRID_AXES, Mesh, MeshAxis
from workbench.parallel.tensor.column_parallel import (
    ColumnParallelGroup,
    ColumnParallelLinear,
    UngroupedColumnParallelLinear,
)
from workbench.parallel.tensor.grid.apply_grid import apply_grid_parallel
from workbench.parallel.tensor.row_parallel import RowParallelLinear
from workbench.parallel.tensor.sequence_parallel import (
    full_sequence_indices,
    local_run,
    shard_positions,
)
from workbench.parallel.tensor.shard_range import ShardRange
from workbench.parallel.tensor.sharded_norm import ShardedRmsNorm
from workbench.parallel.tensor.tensor_collectives import copy_to_tensor_region, gather_tokens
from workbench.parallel.tensor.vocab_parallel import VocabParallelEmbedding, VocabParallelHeadLoss
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import token_parts
from workbench.plan.rules.strategy import operator_rules
from workbench.plan.schema import Plan

MEGATRON_SHARDING = {
    "embedding.tokens": "vocabulary",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.kv_up": "column",
    "blocks.*.attention.o": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "vocabulary",
}
"""Module pattern -> how it is sharded: column, row or vocabulary (Megatron-LM, 1909.08053). Others
are replicated. Attention's projections are sharded by whole heads (`plan.model.head_split`).
"""

WIDTH_NORMS = {"blocks.*.attention.[qk]_norm": "norm"}
"""Norms over all heads, which are sharded as the heads are."""
_DIM = {"column": 0, "vocabulary": 0, "row": 1, "norm": 0}


def apply_tensor_parallel(
    model: Transformer, layouts: dict[str, Layout], plan: Plan, mesh: Mesh
) -> None:
    """Shard a model over the tensor ranks, in place, and record its parameters' new layouts.

    Args:
        model: A stage, on the meta device.
        layouts: Local parameter name -> layout; updated.
    """
    axis, sequence = mesh["tensor"], plan.strategy.tensor.sequence
    if axis.size == 1:
        return
    if plan.strategy.tensor.algorithm != "1d":
        apply_grid_parallel(model, layouts, mesh, plan.strategy.tensor.algorithm)
        return
    table = MEGATRON_SHARDING | (WIDTH_NORMS if model.shape.qk_norm == "width" else {})
    shard_modules(model, layouts, table, axis, sequence)
    if sequence:
        if mesh["context"].size == 1:  # else context parallelism has set them
            model.indices = full_sequence_indices(plan.training.sequence_length)
        model.local_part_of = partial(local_run, axis)
        if model.embedding is not None:
            model.embedding.register_forward_pre_hook(partial(shard_positions, axis))


def tensor_reduction_axes(
    layouts: Iterable[tuple[str, Layout]], plan: Plan, mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    """Local parameter name -> the tensor axes over which its gradient is summed.

    They are those along which ranks hold the same parameter and see different tokens: sequence
    parallelism, or the axes of a tensor grid.
    """
    found = (
        GRID_AXES
        if plan.strategy.tensor.algorithm != "1d"
        else ("tensor",)
        if plan.strategy.tensor.sequence
        else ()
    )
    axes = [name for name in found if name in mesh.axes and mesh[name].size > 1]
    return {
        name: tuple(
            mesh[axis + GRADIENT_GROUP_SUFFIX] for axis in axes if axis in layout.replicated_over
        )
        for name, layout in layouts
    }


def boundary_shape(plan: ResolvedPlan, sequences: int) -> tuple[int, int, int]:
    """Shape of what a rank sends to the next pipeline stage: its part of the `sequences` of a
    microbatch that its data-parallel coordinate has, [B, T, D].
    """
    t, tensor = plan.training, plan.strategy.tensor
    tokens = t.sequence_length // plan.strategy.context.size
    if tensor.sequence:
        tokens //= tensor.ranks
    grid = operator_rules.sides(plan)
    tokens //= math.prod(grid[axis] for axis in operator_rules.boundary_axes(plan))
    side = 1 if isinstance(tensor.size, int) else tensor.size[0]
    return (
        sequences // token_parts(tensor.algorithm, tensor.size),
        tokens,
        plan.shape.hidden // side,
    )


def counts_own_loss(mesh: Mesh) -> bool:
    """Whether this rank's loss counts: it is the first of the tensor ranks with the same tokens."""
    return mesh["tensor.0" if "tensor.0" in mesh.axes else "tensor"].index == 0


def shard_modules(
    model: Transformer,
    layouts: dict[str, Layout],
    table: dict[str, str],
    axis: MeshAxis,
    sequence: bool,
) -> None:
    """Replace modules of a model by their tensor-parallel ones, in place, and record layouts.

    Args:
        table: Module pattern -> column, row or vocabulary.
        sequence: Whether sequence parallelism shards what lies between tensor-parallel regions.
    """
    groups: dict[str, ColumnParallelGroup] = {}
    for path, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in table.items() if fnmatchcase(path, pattern)), None)
        if kind is None:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        projection = name.removesuffix("_norm")
        width = module.weight.shape[_DIM[kind]]
        shard = _shard_range(model, parent, projection, width, axis)
        _shard_parameters(path, module, layouts, kind, axis, shard)
        if kind == "column" and isinstance(parent, LatentAttention):
            # Its projections read a latent each. The rotary key, which no projection of a rank's
            # heads follows, enters their region by itself.
            setattr(parent, name, UngroupedColumnParallelLinear(module.weight, axis, sequence))
            enter = gather_tokens if sequence else copy_to_tensor_region
            parent.share_rotary_key = partial(enter, axis=axis)
        elif kind == "column":
            if parent_path not in groups:
                groups[parent_path] = ColumnParallelGroup(parent, axis, sequence)
            own = ColumnParallelLinear(
                module.weight, module.bias, axis, shard.shard, shard.num_shards
            )
            setattr(parent, name, own)
            groups[parent_path].layers.append(own)
        else:
            setattr(parent, name, _parallel_module(module, kind, axis, shard, sequence, width))


def _shard_range(
    model: Transformer, parent: nn.Module, name: str, length: int, axis: MeshAxis
) -> ShardRange:
    return (
        ShardRange.heads(name, model.shape, axis)
        if isinstance(parent, AnyAttention)
        else ShardRange.even(length, axis)
    )


def _shard_parameters(
    path: str,
    module: nn.Module,
    layouts: dict[str, Layout],
    kind: str,
    axis: MeshAxis,
    shard: ShardRange,
) -> None:
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if parameter is None or (kind == "row" and name == "bias"):
            continue
        key = f"{path}.{name}"
        if axis.name in layouts[key].replicated_over:  # a tied weight is sharded once
            layouts[key] = shard.apply(layouts[key], _DIM[kind])
        own = torch.empty(layouts[key].local_shape, dtype=parameter.dtype, device="meta")
        setattr(module, name, nn.Parameter(own))


def _parallel_module(
    module: nn.Module, kind: str, axis: MeshAxis, shard: ShardRange, sequence: bool, width: int
) -> nn.Module:
    """The tensor-parallel module; `width`: of the sharded dim before it was sharded."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if kind == "row":
        return RowParallelLinear(weight, module.bias, axis, shard.num_real, sequence)  # type: ignore[arg-type]
    if isinstance(module, AddNorm):
        return ShardedRmsNorm(weight, width, module.epsilon, axis)
    rows = shard.start, shard.stop
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(weight, rows, axis, sequence)
    assert isinstance(module, HeadLoss)
    return VocabParallelHeadLoss(weight, rows, axis, sequence, module.softcap)
