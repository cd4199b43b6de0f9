"""Apply operator strategies: give each module its sharding, and shard its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.models import Transformer
from workbench.models.counter_dropout import Dropout
from workbench.models.moe import MoE
from workbench.models.seams import Activate, AddNorm, Attend, HeadLoss, NoRope, Rope
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.expert.apply_expert import PARTIAL_OVER_WIDTH
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis, operator_axis
from workbench.parallel.operators.implicit_replicate import ImplicitReplicate
from workbench.parallel.operators.moe_operator import moe_operator
from workbench.parallel.operators.operator_forward import (
    TOKEN_DIMS,
    DropoutOperator,
    EmbeddingOperator,
    FollowInput,
    ForwardFn,
    HeadOperator,
    LinearOperator,
    LocalOperator,
    PositionsOperator,
    RopeOperator,
)
from workbench.parallel.operators.operator_grid import OperatorGrid
from workbench.parallel.operators.redistribution import (
    OperatorSharding,
    RedistributionGrid,
    SharedInputs,
)
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.operator_sites import OUTPUT, POSITIONS
from workbench.plan.operators.redistribution_moves import neighbors
from workbench.plan.operators.strategy_form import Placement
from workbench.plan.operators.tensor_layout import TensorLayout

SHARDED_PARAMETERS: tuple[tuple[type[nn.Module], dict[str, tuple[str, ...]]], ...] = (
    (nn.Linear, {"weight": ("columns", "inner"), "bias": ("columns",)}),
    (HeadLoss, {"weight": ("columns", "inner")}),
    (nn.Embedding, {"weight": ("vocabulary", "hidden")}),
)
"""Modules whose parameters are sharded -> the dimension of each dim of each parameter."""
FOLLOWING_MODULES: tuple[tuple[tuple[type[nn.Module], ...], tuple[int, ...] | None], ...] = (
    ((Activate,), None),
    ((NoRope,), None),
    ((Attend, RingAttend, UlyssesAttend), (0, 2)),
)
"""Modules that take the sharding of their first input, and the dims that may be sharded there."""
LOCAL_DIMS = TOKEN_DIMS | {"width": -1, "heads": 2}
"""Dimensions of activations -> their dim, for modules that compute shards independently."""


def apply_operator_strategies(
    model: nn.Module,
    layouts: dict[str, Layout],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    least: LeastRedistribution,
    boundary: Sequence[int] = (),
) -> None:
    """Shard a model as `placements` say, module by module, in place, and record the new layouts.

    A module without a strategy runs on replicated inputs on every rank; one that has no parameters
    and computes shards independently takes the sharding of its input.

    Args:
        model: On the meta device.
        layouts: Local parameter name -> layout; updated.
        placements: Module -> the dimension that each axis of the grid shards.
        least: Chooses how tensors are redistributed.
        boundary: Axes over which what passes between pipeline stages is split by tokens.
    """
    if mesh.operators is None:
        return
    grid, between = OperatorGrid(mesh), redistribution_grid(mesh, mesh.operators, least)
    for name, layout in layouts.items():
        layouts[name] = layout.sharded_over("tensor", but=grid.names)
    shared: dict[str, SharedInputs] = {}
    replicate: Placement = (None,) * len(grid.axes)
    for path, module in _outside_experts(model):
        named = path in placements or f"{path}.loss" in placements
        placement = placements.get(path, replicate)
        if named:
            _shard_parameters(path, module, layouts, placement, grid)
        parent = path.rpartition(".")[0]
        if (named or isinstance(module, HeadLoss | nn.Linear | MoE)) and parent not in shared:
            shared[parent] = SharedInputs()
            owner = model.get_submodule(parent)
            owner.forward = shared[parent].during(owner.forward)
        inputs, output = shared.get(parent, SharedInputs()), placements.get(path + OUTPUT)
        sharding = OperatorSharding(between, placement, inputs, output)
        forward: ForwardFn | None
        if isinstance(module, MoE):
            forward = moe_operator(path, module, layouts, sharding, grid)
        elif isinstance(module, HeadLoss):
            forward = _head(path, module, layouts, placements, sharding, grid)
        elif named or isinstance(module, nn.Linear):
            forward = _named(path, module, layouts, sharding, grid)
        else:
            forward = _unnamed(module, between)
        if forward is not None:
            module.forward = forward
    if isinstance(model, Transformer):  # its custom backward takes no DTensor
        model.attach_aux_loss = partial(_on_replicated, model.attach_aux_loss, between)
    passed = TensorLayout(((), tuple(boundary), ()))
    model.forward = partial(_stage_forward, model.forward, between, passed)


def redistribution_grid(
    mesh: Mesh, device: DeviceMesh, least: LeastRedistribution
) -> RedistributionGrid:
    axes = {run: mesh[operator_axis(run)] for run in neighbors(range(device.ndim))}
    return RedistributionGrid(device, axes, least)


def _outside_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, by path, but those within an MoE layer, which is one operator."""
    modules = list(model.named_modules())
    layers = tuple(f"{path}." for path, module in modules if isinstance(module, MoE))
    return [(path, module) for path, module in modules if not path.startswith(layers)]


def operator_reduction_axes(
    names: Iterable[str], placements: Mapping[str, Placement], mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    """Local parameter name -> the axes of the grid over which its gradient is summed.

    They are those along which its module shards the rows or their tokens, for a bias also those
    along which its output does, and for `PARTIAL_OVER_WIDTH` the width.
    """
    if mesh.operators is None:
        return dict.fromkeys(names, ())
    grid, found = OperatorGrid(mesh), {}
    for name in names:
        own = _placement_around(name, placements)
        if name.endswith(".bias"):  # it is added to the output
            own = placements.get(name.removesuffix(".bias") + OUTPUT, own)
        over = {*TOKEN_DIMS} | ({"width"} if name.endswith(PARTIAL_OVER_WIDTH) else set())
        found[name] = tuple(axis for axis, placed in zip(grid.axes, own) if placed in over)
    return found


def _placement_around(name: str, placements: Mapping[str, Placement]) -> Placement:
    """That of the innermost module with a strategy round a parameter; () without one."""
    owner = name.rpartition(".")[0]
    return placements.get(owner) or (_placement_around(owner, placements) if owner else ())


def _shard_parameters(
    path: str,
    module: nn.Module,
    layouts: dict[str, Layout],
    placement: Placement,
    grid: OperatorGrid,
) -> None:
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
        if path == POSITIONS:
            return PositionsOperator(module, sharding)
        return EmbeddingOperator(module, sharding, layouts[f"{path}.weight"])
    if isinstance(module, AddNorm | nn.LayerNorm | nn.RMSNorm):
        return LocalOperator(module.forward, sharding, TOKEN_DIMS)
    return LocalOperator(module.forward, sharding, LOCAL_DIMS)


def _unnamed(module: nn.Module, grid: RedistributionGrid) -> ForwardFn | None:
    if isinstance(module, Rope):
        return RopeOperator(grid, module.forward)
    for kinds, dims in FOLLOWING_MODULES:
        if isinstance(module, kinds):
            return FollowInput(grid, module.forward, dims)
    if isinstance(module, Dropout):
        return DropoutOperator(grid, module, module.forward)
    if next(module.parameters(recurse=False), None) is not None:
        return partial(_on_replicated, module.forward, grid)
    return None


def _on_replicated(forward: ForwardFn, grid: RedistributionGrid, *inputs: Any, **named: Any) -> Any:
    return forward(
        *map(grid.replicated, inputs),
        **{name: grid.replicated(value) for name, value in named.items()},
    )


def _head(
    path: str,
    module: HeadLoss,
    layouts: dict[str, Layout],
    placements: Mapping[str, Placement],
    sharding: OperatorSharding,
    grid: OperatorGrid,
) -> HeadOperator:
    layout = layouts[f"{path}.weight"]
    own = {"rows": "rows", "tokens": "tokens", "columns": "vocabulary"}
    (start, stop), vocab = layout.slices[0], layout.shape[0]
    loss = placements.get(f"{path}.loss", tuple(own.get(name or "") for name in sharding.placement))
    axes, rows = grid.over(loss, "vocabulary"), (start, stop)
    if axes != grid.over(sharding.placement, "columns"):
        rows = grid.shard_over(
            Layout.unsharded("", (vocab,)).sharded_over("tensor", but=grid.names), 0, axes
        ).slices[0]
    kernels, below = getattr(module, "kernels", "eager"), getattr(module, "plain_below", 0)
    return HeadOperator(
        module,
        sharding,
        replace(sharding, placement=loss),
        rows,
        stop - start,
        grid.joint(axes),
        kernels,
        below,
    )


def _stage_forward(
    forward: ForwardFn, grid: RedistributionGrid, passed: TensorLayout, x: Tensor, *targets: Tensor
) -> Tensor:
    """A stage's forward. What passes between stages is this rank's part in the layout `passed`; the
    loss is replicated.
    """
    with ImplicitReplicate(grid):
        if passed.sharding and x.is_floating_point():
            x = grid.dtensor(x, passed)
        local, held = grid.local(forward(x, *targets))
        return grid.redistribute(local, held, passed if local.ndim > 1 else held.summed)
