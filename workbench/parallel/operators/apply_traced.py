"""Run a user's module as its traced graph: operators sharded by a plan's strategies, dropout drawn
alike on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from workbench.models.counter_dropout import SampleIndices
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.apply_operators import redistribution_grid
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.traced_forward import TracedForward
from workbench.parallel.operators.traced_module import TracedModule
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.traced.graph_placement import FactorLayout
from workbench.plan.operators.traced.node_factors import TensorFactors
from workbench.plan.operators.traced.traced_graph import TensorRef


def apply_traced(
    model: nn.Module,
    traced: TracedModule,
    layouts: dict[str, Layout],
    mesh: Mesh,
    least: LeastRedistribution | None,
    samples: SampleIndices,
    seed: int,
) -> dict[str, tuple[MeshAxis, ...]]:
    """Let `model` run as its graph, in place, and shard its parameters.

    Args:
        model: Its parameters are replaced by local ones on the meta device.
        traced: Its graph.
        layouts: Parameter name -> layout; updated.
        mesh: This rank's place.
        least: Chooses how tensors are redistributed on its grid, if it has one.
        samples: Which samples the next forward sees.
        seed: Of dropout.

    Returns:
        Parameter name -> the axes of the grid over which its gradient is summed once a step.
    """
    axes = [mesh[name] for name in mesh.operator_axes]
    names = tuple(axis.name for axis in axes)
    if axes:
        for name, layout in layouts.items():
            layouts[name] = layout.sharded_over("tensor", but=names)
    sums: dict[str, tuple[MeshAxis, ...]] = dict.fromkeys(layouts, ())
    for key, name in traced.factored.graph.parameters.items():
        stored = traced.stored[key]
        factors = traced.factored.tensors[TensorRef(key)]
        layouts[name] = sharded_layout(layouts[name], factors, stored.layout, axes)
        sums[name] = tuple(axes[at] for at in sorted(stored.summed))
        _replace(model, name, layouts[name])
    between = None
    if least is not None and mesh.operators is not None:
        between = redistribution_grid(mesh, mesh.operators, least)
    grid = FactorGrid(tuple(axes), between)
    model.forward = traced_forward(model, traced, grid, samples, seed)
    return sums


def traced_forward(
    model: nn.Module, traced: TracedModule, grid: FactorGrid, samples: SampleIndices, seed: int
) -> TracedForward:
    """The forward of a module as its graph."""
    return TracedForward(
        model, traced.factored, traced.shards, traced.stored, traced.constants, grid, samples, seed
    )


def sharded_layout(
    layout: Layout, factors: TensorFactors, stored: FactorLayout, axes: Sequence[MeshAxis]
) -> Layout:
    """The layout of a parameter that is stored sharded by factors; evenly, since they divide."""
    first = 0
    for dim, sizes in enumerate(factors.dims):
        for place, size in enumerate(sizes):
            own = [axis for axis, at in zip(axes, stored) if at == first + place]
            if own:
                inner, outer = math.prod(sizes[place + 1 :]), math.prod(sizes[:place])
                index, shards = 0, 1
                for axis in own:
                    index, shards = index * axis.size + axis.index, shards * axis.size
                length = size // shards * inner
                bounds = index * length, (index + 1) * length
                layout = layout.split_strided(
                    dim, tuple(axis.name for axis in own), bounds, outer, size * inner
                )
        first += len(sizes)
    return layout


def _replace(model: nn.Module, name: str, layout: Layout) -> None:
    """Replace a parameter, wherever it is tied, by a local one on the meta device."""
    old = model.get_parameter(name)
    local = nn.Parameter(torch.empty(layout.local_shape, dtype=old.dtype, device="meta"))
    for module in model.modules():
        for own, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if value is old:
                setattr(module, own, local)
