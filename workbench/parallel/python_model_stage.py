"""A model that is the user's code, as one stage: data parallelism and ZeRO as it is, operator
strategies by pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from workbench.models.python_model import add_loss
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.parallel.operators.apply_operators import (
    apply_operator_strategies,
    operator_reduction_axes,
)
from workbench.parallel.operators.module_sites import placements_of
from workbench.plan.schema import Plan


def apply_to_python_model(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    overlap: bool,
    device: torch.device,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> ParamAndGradStore:
    """Make `model`, a whole module in host memory or on the meta device, this rank's part, in
    place; its store.

    Parameters and buffers are then on `device` in `dtype`: as the factory has drawn them, or zero
    for a meta one's. Raises `PlanError` where a strategy names what the module does not have.
    """
    model.train()
    initial = dict(model.named_parameters())
    layouts = {name: Layout.unsharded(name, tuple(value.shape)) for name, value in initial.items()}
    placements = placements_of(model, plan)
    apply_operator_strategies(model, layouts, placements, mesh)
    add_loss(model)
    _move_buffers(model, device, dtype)
    sums = {
        name: (*axes, mesh["replicas"])
        for name, axes in operator_reduction_axes(layouts, placements, mesh).items()
    }
    draw = partial(_init_local_param, initial, layouts, device, dtype)
    store = ParamAndGradStore(
        {0: model},
        layouts,
        sums,
        mesh,
        plan.strategy.data,
        gradient_dtype,
        draw,
        overlap,
        separate=None,
    )
    initial.clear()
    return store


def _init_local_param(
    initial: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    device: torch.device,
    dtype: torch.dtype,
    name: str,
) -> Tensor:
    layout, value = layouts[name], initial[name]
    if value.is_meta:
        return torch.zeros(layout.local_shape, dtype=dtype, device=device)
    return layout.take(value.detach().to(dtype)).to(device)


def _move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            kind = dtype if buffer.is_floating_point() else buffer.dtype
            if buffer.is_meta:
                setattr(module, name, torch.zeros(buffer.shape, dtype=kind, device=device))
            else:
                setattr(module, name, buffer.to(device, kind))
