"""Run a user's module as its traced graph: operators sharded by a plan's strategies, dropout drawn
alike on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from workbench.models.counter_dropout import SampleIndices
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.apply_operators import redistribution_grid
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.operator_grid import joint_index
from workbench.parallel.operators.traced_forward import TracedForward
from workbench.parallel.operators.traced_module import TracedModule
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.traced.graph_placement import FactorLayout
from workbench.plan.operators.traced.node_factors import TensorFactors
from workbench.plan.operators.traced.stage_cuts import tied_parameter
from workbench.plan.operators.traced.traced_graph import TensorRef


class AppliedTrace(NamedTuple):
    """A model that runs as its graph.

    Attributes:
        modules: Of each pipeline stage of this rank.
        summed: Parameter name -> the axes of the grid over which its gradient is summed once a
            step.
        boundary: Local shape of what passes between stages.
        tied: Name of a parameter that the first and the last stage share, if this rank has one of
            the two.
    """

    modules: dict[int, nn.Module]
    summed: dict[str, tuple[MeshAxis, ...]]
    boundary: tuple[int, ...]
    tied: str | None = None


def apply_traced(
    model: nn.Module,
    traced: TracedModule,
    layouts: dict[str, Layout],
    mesh: Mesh,
    least: LeastRedistribution | None,
    samples: SampleIndices,
    seed: int,
    stages: Sequence[int] = (0,),
) -> AppliedTrace:
    """Let `model` run as its graph, in place, and shard its parameters.

    Args:
        model: Its parameters are replaced by local ones on the meta device.
        traced: Its graph.
        layouts: Parameter name -> layout; updated.
        mesh: This rank's place.
        least: Chooses how tensors are redistributed on its grid, if it has one.
        samples: Which samples the next forward sees.
        seed: Of dropout.
        stages: Pipeline stages of this rank.
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
    modules = {stage: _stage_module(model, traced, stage) for stage in stages}
    for stage, module in modules.items():
        module.forward = traced_forward(module, traced, grid, samples, seed, stage)
    tied = _tied(traced, stages)
    if tied is not None and 0 not in stages:  # the first stage's copy counts
        layouts[tied] = replace(layouts[tied], replica=True)
    return AppliedTrace(modules, sums, _boundary(traced, grid), tied)


def _tied(traced: TracedModule, stages: Sequence[int]) -> str | None:
    graph, ends = traced.factored.graph, {0, len(traced.stages) - 1}
    key = tied_parameter(graph, traced.stages)
    return graph.parameters[key] if key is not None and len(ends & {*stages}) == 1 else None


def _boundary(traced: TracedModule, grid: FactorGrid) -> tuple[int, ...]:
    """Local shape of what passes between stages; none is one stage."""
    ref = traced.stages[0].written
    layout = traced.shards[ref.source].outputs[ref.index]
    return tuple(grid.local_shape(traced.factored.tensors[ref], layout))


def _stage_module(model: nn.Module, traced: TracedModule, stage: int) -> nn.Module:
    """A module with the parameters and buffers of a stage, by their names in the model; the model
    itself where it is the only one. Parameters that nothing reads belong to the first.
    """
    if len(traced.stages) == 1:
        return model
    graph = traced.factored.graph
    read = [{ref.source for n in part.nodes for ref in n.inputs} for part in traced.stages]
    others = set().union(*read[:stage], *read[stage + 1 :])
    names = {graph.parameters[key] for key in read[stage] if key in graph.parameters}
    if stage == 0:
        elsewhere = {graph.parameters[key] for key in others if key in graph.parameters}
        names |= {name for name, _ in model.named_parameters()} - elsewhere
    root = nn.Module()
    for name in [name for name, _ in model.named_parameters() if name in names]:
        path, _, last = name.rpartition(".")
        _submodule(root, path).register_parameter(last, model.get_parameter(name))
    for key in sorted(read[stage] & graph.buffers.keys()):
        path, _, last = graph.buffers[key].rpartition(".")
        _submodule(root, path).register_buffer(last, model.get_buffer(graph.buffers[key]))
    return root


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a path, made with those above it where they are missing."""
    for part in path.split(".") if path else []:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def traced_forward(
    model: nn.Module,
    traced: TracedModule,
    grid: FactorGrid,
    samples: SampleIndices,
    seed: int,
    stage: int = 0,
) -> TracedForward:
    """The forward of a module as its graph, or as a stage of it."""
    return TracedForward(
        model,
        traced.factored,
        traced.stages[stage],
        traced.shards,
        traced.stored,
        traced.constants,
        grid,
        samples,
        seed,
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
                index, shards = joint_index(own)
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
