"""Give each module of a model the strategy that the plan has for it, and narrow its parameters."""

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
    Embedding,
    Follow,
    Forward,
    Head,
    Local,
    MatMul,
    SelfAttention,
)
from workbench.parallel.operators.redistribution import Shared, Split, whole
from workbench.plan.operator_strategy import Placement

SHARDED_PARAMETERS: tuple[tuple[type[nn.Module], dict[str, tuple[str, ...]]], ...] = (
    (nn.Linear, {"weight": ("columns", "inner"), "bias": ("columns",)}),
    (HeadLoss, {"weight": ("columns", "inner")}),
    (nn.Embedding, {"weight": ("vocabulary", "hidden")}),
)
"""Modules whose parameters are cut: the dimensions of each."""
FOLLOWING_MODULES: tuple[tuple[tuple[type[nn.Module], ...], tuple[int, ...] | None], ...] = (
    ((Activate,), None),
    ((Attend, Rope, NoRope), (0, 2)),
)
"""Modules that go on with whatever lies before them, and which dimensions may be split there."""
REPLICATED_HEAD_PARAMETERS = ("in_proj_weight", "in_proj_bias")
"""Parameters of attention that every rank holds whole, and uses its own heads' rows of."""
LOCAL_DIMS = {"rows": 0, "width": -1, "heads": 2}
"""Where the dimensions of activations lie that a module computes part by part."""


class OperatorGrid:
    """The grid of operators as this rank sees it."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.operators is not None
        self.device, self.tensor = mesh.operators, mesh["tensor"]
        self.axes = [mesh[f"operators.{i}"] for i in range(self.device.ndim)]
        self.names = tuple(axis.name for axis in self.axes)

    def over(self, placement: Placement, name: str) -> list[MeshAxis]:
        """Axes that split the dimension `name`, outermost first."""
        return [axis for axis, placed in zip(self.axes, placement) if placed == name]

    def cut(self, layout: Layout, dim: int, axes: list[MeshAxis]) -> Layout:
        """`layout` further split along `dim` over `axes` into equal pieces, padded where it does
        not divide.
        """
        if not axes:
            return layout
        index, pieces = _joint(axes)
        length = layout.slices[dim][1] - layout.slices[dim][0]
        room = -(-length // pieces)
        start = min(index * room, length)
        layout = layout.split_at(dim, axes[0], (start, min(start + room, length)), room)
        for axis in axes[1:]:
            layout = layout.sharded_over(axis.name)
        return layout


def _joint(axes: list[MeshAxis]) -> tuple[int, int]:
    """(place of this rank, number of places) on several axes together, outermost first."""
    index, size = 0, 1
    for axis in axes:
        index, size = index * axis.size + axis.index, size * axis.size
    return index, size


def apply_operator_strategies(
    model: nn.Module, layouts: dict[str, Layout], placements: Mapping[str, Placement], mesh: Mesh
) -> None:
    """Split a model on the meta device as `placements` say, module by module, in place, and record
    the new layouts.

    What is not named is repeated by every rank on whole inputs, or, where it has no parameters and
    computes part by part, goes on with what lies before it.
    """
    if mesh.operators is None:
        return
    grid = OperatorGrid(mesh)
    for name, layout in layouts.items():
        layouts[name] = layout.sharded_over("tensor", but=grid.names)
    shared: dict[str, Shared] = {}
    nowhere: Placement = (None,) * len(grid.axes)
    for path, module in list(model.named_modules()):
        named = path in placements or f"{path}.loss" in placements
        placement = placements.get(path, nowhere)
        if named:
            _narrow(path, module, layouts, placement, grid)
        parent = path.rpartition(".")[0]
        if (named or isinstance(module, HeadLoss)) and parent not in shared:
            shared[parent] = Shared()
            model.get_submodule(parent).register_forward_hook(
                shared[parent].forget, always_call=True
            )
        split = Split(grid.device, placement, shared.get(parent, Shared()))
        if isinstance(module, HeadLoss):
            forward: Forward | None = _head(path, module, layouts, placements, split, grid)
        else:
            forward = _named(path, module, layouts, split, grid) if named else _unnamed(module)
        if forward is not None:
            module.forward = forward
    model.forward = partial(_implicitly_replicated, model.forward, grid.device)


def operator_reduction_axes(
    names: Iterable[str], placements: Mapping[str, Placement], mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    """Local name -> axes over which a parameter's gradient is summed: those along which its module
    splits the rows, and for a projection that all heads share, the heads.
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


def _narrow(
    path: str,
    module: nn.Module,
    layouts: dict[str, Layout],
    placement: Placement,
    grid: OperatorGrid,
) -> None:
    if isinstance(module, nn.MultiheadAttention):
        inner: Placement = tuple("inner" if name == "heads" else name for name in placement)
        return _narrow(f"{path}.out_proj", module.out_proj, layouts, inner, grid)
    table = next((table for kind, table in SHARDED_PARAMETERS if isinstance(module, kind)), {})
    for name, dims in table.items():
        parameter, key = getattr(module, name), f"{path}.{name}"
        if parameter is None:
            continue
        for dim, dimension in enumerate(dims):
            layouts[key] = grid.cut(layouts[key], dim, grid.over(placement, dimension))
        setattr(
            module,
            name,
            nn.Parameter(
                torch.empty(layouts[key].local_shape, dtype=parameter.dtype, device="meta")
            ),
        )


def _named(
    path: str, module: nn.Module, layouts: dict[str, Layout], split: Split, grid: OperatorGrid
) -> Forward:
    if isinstance(module, nn.Linear):
        return MatMul(module, split)
    if isinstance(module, nn.Embedding):
        return Embedding(module, split, layouts[f"{path}.weight"])
    if isinstance(module, nn.MultiheadAttention):
        return SelfAttention(module, split, *_joint(grid.over(split.placement, "heads")))
    if isinstance(module, AddNorm | nn.LayerNorm | nn.RMSNorm):
        return Local(module.forward, split, {"rows": 0})
    return Local(module.forward, split, LOCAL_DIMS)


def _unnamed(module: nn.Module) -> Forward | None:
    for kinds, dims in FOLLOWING_MODULES:
        if isinstance(module, kinds):
            return Follow(module.forward, dims)
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = (
            0  # else it evaluates by one fused operator, past its own modules
        )
    if next(module.parameters(recurse=False), None) is not None:
        return partial(_on_replicated, module.forward)
    return None


def _on_replicated(forward: Forward, *inputs: Any, **named: Any) -> Any:
    return forward(*map(whole, inputs), **{name: whole(value) for name, value in named.items()})


def _head(
    path: str,
    module: HeadLoss,
    layouts: dict[str, Layout],
    placements: Mapping[str, Placement],
    split: Split,
    grid: OperatorGrid,
) -> Head:
    layout, own = layouts[f"{path}.weight"], {"rows": "rows", "columns": "vocabulary"}
    (start, stop), vocab = layout.slices[0], layout.shape[0]
    loss = placements.get(f"{path}.loss", tuple(own.get(name or "") for name in split.placement))
    axes, rows = grid.over(loss, "vocabulary"), (start, stop)
    if axes != grid.over(split.placement, "columns"):
        rows = grid.cut(
            Layout.unsharded("", (vocab,)).sharded_over("tensor", but=grid.names), 0, axes
        ).slices[0]
    axis = None if not axes else axes[0] if len(axes) == 1 else grid.tensor
    kernels, below = getattr(module, "kernels", "eager"), getattr(module, "plain_below", 0)
    return Head(
        module, split, replace(split, placement=loss), rows, stop - start, axis, kernels, below
    )


def _implicitly_replicated(forward: Forward, mesh: DeviceMesh, *inputs: Any, **named: Any) -> Any:
    """The model's forward; what leaves it is whole."""
    with ImplicitReplicate(mesh):
        return whole(forward(*inputs, **named))
