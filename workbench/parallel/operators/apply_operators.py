"""Apply operator strategies: give each module its sharding, and shard its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.models.seams import Activate, AddNorm, Attend, HeadLoss, NoRope, Rope
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.implicit_replicate import ImplicitReplicate
from workbench.parallel.operators.operator_forward import (
    EmbeddingOperator,
    FollowInput,
    ForwardFn,
    HeadOperator,
    LinearOperator,
    LocalOperator,
    SelfAttentionOperator,
)
from workbench.parallel.operators.redistribution import OperatorSharding, SharedInputs, replicated
from workbench.plan.operators.strategy_form import Placement

SHARDED_PARAMETERS: tuple[tuple[type[nn.Module], dict[str, tuple[str, ...]]], ...] = (
    (nn.Linear, {"weight": ("columns", "inner"), "bias": ("columns",)}),
    (HeadLoss, {"weight": ("columns", "inner")}),
    (nn.Embedding, {"weight": ("vocabulary", "hidden")}),
)
"""Modules whose parameters are sharded -> the dimension of each dim of each parameter."""
FOLLOWING_MODULES: tuple[tuple[tuple[type[nn.Module], ...], tuple[int, ...] | None], ...] = (
    ((Activate,), None),
    ((Attend, Rope, NoRope), (0, 2)),
)
"""Modules that take the sharding of their first input, and the dims that may be sharded there."""
REPLICATED_HEAD_PARAMETERS = ("in_proj_weight", "in_proj_bias")
"""Parameters of attention that every rank holds unsharded; it uses the rows of its heads."""
LOCAL_DIMS = {"rows": 0, "width": -1, "heads": 2}
"""Dimensions of activations -> their dim, for modules that compute shards independently."""


class OperatorGrid:
    """The grid that tensor ranks are to operator strategies, as this rank sees it."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.operators is not None
        self.device, self.tensor = mesh.operators, mesh["tensor"]
        self.axes = [mesh[name] for name in mesh.operator_axes]
        self.names = tuple(axis.name for axis in self.axes)

    def over(self, placement: Placement, name: str) -> list[MeshAxis]:
        """Axes that shard the dimension `name`, outermost first."""
        return [axis for axis, placed in zip(self.axes, placement) if placed == name]

    def shard_over(self, layout: Layout, dim: int, axes: list[MeshAxis]) -> Layout:
        """`layout` sharded evenly along `dim` over several axes, padded where it does not
        divide.
        """
        if not axes:
            return layout
        index, num_shards = _joint_index(axes)
        length = layout.slices[dim][1] - layout.slices[dim][0]
        num_local = -(-length // num_shards)
        start = min(index * num_local, length)
        layout = layout.split_at(dim, axes[0], (start, min(start + num_local, length)), num_local)
        for axis in axes[1:]:
            layout = layout.sharded_over(axis.name)
        return layout


def _joint_index(axes: list[MeshAxis]) -> tuple[int, int]:
    """(index of this rank, size) on several axes taken as one, outermost first."""
    index, size = 0, 1
    for axis in axes:
        index, size = index * axis.size + axis.index, size * axis.size
    return index, size


def apply_operator_strategies(
    model: nn.Module, layouts: dict[str, Layout], placements: Mapping[str, Placement], mesh: Mesh
) -> None:
    """Shard a model as `placements` say, module by module, in place, and record the new layouts.

    A module without a strategy runs on replicated inputs on every rank; one that has no parameters
    and computes shards independently takes the sharding of its input.

    Args:
        model: On the meta device.
        layouts: Local parameter name -> layout; updated.
        placements: Module -> the dimension that each axis of the grid shards.
    """
    if mesh.operators is None:
        return
    grid = OperatorGrid(mesh)
    for name, layout in layouts.items():
        layouts[name] = layout.sharded_over("tensor", but=grid.names)
    shared: dict[str, SharedInputs] = {}
    replicate: Placement = (None,) * len(grid.axes)
    for path, module in list(model.named_modules()):
        named = path in placements or f"{path}.loss" in placements
        placement = placements.get(path, replicate)
        if named:
            _shard_parameters(path, module, layouts, placement, grid)
        parent = path.rpartition(".")[0]
        if (named or isinstance(module, HeadLoss)) and parent not in shared:
            shared[parent] = SharedInputs()
            model.get_submodule(parent).register_forward_hook(
                shared[parent].clear, always_call=True
            )
        sharding = OperatorSharding(grid.device, placement, shared.get(parent, SharedInputs()))
        if isinstance(module, HeadLoss):
            forward: ForwardFn | None = _head(path, module, layouts, placements, sharding, grid)
        else:
            forward = _named(path, module, layouts, sharding, grid) if named else _unnamed(module)
        if forward is not None:
            module.forward = forward
    model.forward = partial(_implicitly_replicated, model.forward, grid.device)


def operator_reduction_axes(
    names: Iterable[str], placements: Mapping[str, Placement], mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    """Local parameter name -> the axes of the grid over which its gradient is summed.

    They are those along which its module shards the rows, and for a projection that is replicated
    for all heads, the heads.
    """
    if mesh.operators is None:
        return dict.fromkeys(names, ())
    grid, found = OperatorGrid(mesh), {}
    for name in names:
        owner, _, last = name.rpartition(".")
        own = placements.get(owner, placements.get(owner.removesuffix(".out_proj"), ()))
        over = ("rows", "heads") if last in REPLICATED_HEAD_PARAMETERS else ("rows",)
        found[name] = tuple(axis for axis, placed in zip(grid.axes, own) if placed in over)
    return found


def _shard_parameters(
    path: str,
    module: nn.Module,
    layouts: dict[str, Layout],
    placement: Placement,
    grid: OperatorGrid,
) -> None:
    if isinstance(module, nn.MultiheadAttention):
        inner: Placement = tuple("inner" if name == "heads" else name for name in placement)
        return _shard_parameters(f"{path}.out_proj", module.out_proj, layouts, inner, grid)
    table = next((table for kind, table in SHARDED_PARAMETERS if isinstance(module, kind)), {})
    for name, dims in table.items():
        parameter, key = getattr(module, name), f"{path}.{name}"
        if parameter is None:
            continue
        for dim, dimension in enumerate(dims):
            layouts[key] = grid.shard_over(layouts[key], dim, grid.over(placement, dimension))
        setattr(
            module,
            name,
            nn.Parameter(
                torch.empty(layouts[key].local_shape, dtype=parameter.dtype, device="meta")
            ),
        )


def _named(
    path: str,
    module: nn.Module,
    layouts: dict[str, Layout],
    sharding: OperatorSharding,
    grid: OperatorGrid,
) -> ForwardFn:
    if isinstance(module, nn.Linear):
        return LinearOperator(module, sharding)
    if isinstance(module, nn.Embedding):
        return EmbeddingOperator(module, sharding, layouts[f"{path}.weight"])
    if isinstance(module, nn.MultiheadAttention):
        return SelfAttentionOperator(
            module, sharding, *_joint_index(grid.over(sharding.placement, "heads"))
        )
    if isinstance(module, AddNorm | nn.LayerNorm | nn.RMSNorm):
        return LocalOperator(module.forward, sharding, {"rows": 0})
    return LocalOperator(module.forward, sharding, LOCAL_DIMS)


def _unnamed(module: nn.Module) -> ForwardFn | None:
    for kinds, dims in FOLLOWING_MODULES:
        if isinstance(module, kinds):
            return FollowInput(module.forward, dims)
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = (
            0  # else evaluation takes a fused path that does not call its modules
        )
    if next(module.parameters(recurse=False), None) is not None:
        return partial(_on_replicated, module.forward)
    return None


def _on_replicated(forward: ForwardFn, *inputs: Any, **named: Any) -> Any:
    return forward(
        *map(replicated, inputs), **{name: replicated(value) for name, value in named.items()}
    )


def _head(
    path: str,
    module: HeadLoss,
    layouts: dict[str, Layout],
    placements: Mapping[str, Placement],
    sharding: OperatorSharding,
    grid: OperatorGrid,
) -> HeadOperator:
    layout, own = layouts[f"{path}.weight"], {"rows": "rows", "columns": "vocabulary"}
    (start, stop), vocab = layout.slices[0], layout.shape[0]
    loss = placements.get(f"{path}.loss", tuple(own.get(name or "") for name in sharding.placement))
    axes, rows = grid.over(loss, "vocabulary"), (start, stop)
    if axes != grid.over(sharding.placement, "columns"):
        rows = grid.shard_over(
            Layout.unsharded("", (vocab,)).sharded_over("tensor", but=grid.names), 0, axes
        ).slices[0]
    axis = None if not axes else axes[0] if len(axes) == 1 else grid.tensor
    kernels, below = getattr(module, "kernels", "eager"), getattr(module, "plain_below", 0)
    return HeadOperator(
        module,
        sharding,
        replace(sharding, placement=loss),
        rows,
        stop - start,
        axis,
        kernels,
        below,
    )


def _implicitly_replicated(forward: ForwardFn, mesh: DeviceMesh, *inputs: Any, **named: Any) -> Any:
    """The model's forward; its output is replicated."""
    with ImplicitReplicate(mesh):
        return replicated(forward(*inputs, **named))
