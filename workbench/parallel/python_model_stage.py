"""A user's Python model as a single stage: data parallelism, ZeRO and operator strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from workbench.copy_stream import CopyStream
from workbench.models.counter_dropout import SampleIndices
from workbench.models.deferred_init import FillReplay
from workbench.models.python_model import add_loss
from workbench.parallel.data.sharded_params import ParamInit
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.parallel.operators.apply_traced import AppliedTrace, apply_traced
from workbench.parallel.operators.traced_module import trace_for_plan
from workbench.plan.optimizer_state import has_master
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh


def apply_to_python_model(
    model: nn.Module,
    plan: ResolvedPlan,
    mesh: Mesh,
    overlap: bool,
    device: torch.device,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    replay: FillReplay | None,
    samples: SampleIndices,
    stages: Sequence[int],
) -> tuple[AppliedTrace, ParamAndGradStore]:
    """Shard `model`, in place.

    Parameters and buffers are then on `device` in `dtype`: as the factory has initialized them;
    zero where they are on the meta device and nothing is recorded that fills them.

    Args:
        model: Unsharded, in host memory or on the meta device.
        overlap: Whether gradients are reduced during backward.
        gradient_dtype: Of accumulated and reduced gradients.
        replay: Fills parameters whose initialization was recorded; None where a checkpoint is
            loaded over all of them.
        samples: Which samples the next forward sees, for dropout.
        stages: Pipeline stages of this rank.

    Returns:
        The stages, and the store of their parameters and gradients.

    Raises:
        PlanError: Where a strategy names what the module does not have.
    """
    traced = trace_for_plan(model, plan, dtype)
    initial = dict(model.named_parameters())
    layouts = {name: Layout.unsharded(name, tuple(value.shape)) for name, value in initial.items()}
    applied = AppliedTrace({0: model}, dict.fromkeys(layouts, ()), ())
    if traced is not None:
        least = operator_mesh(plan).redistribution if mesh.operators is not None else None
        seed = plan.training.seed
        applied = apply_traced(model, traced, layouts, mesh, least, samples, seed, stages)
    else:
        add_loss(model, plan.vocab)
    for module in applied.modules.values():
        _move_buffers(module, device, dtype)
    sums = {name: (*axes, mesh["replicas"]) for name, axes in applied.summed.items()}
    fill = None if replay is None else partial(_fill_initial, initial, replay)
    init = ParamInit(
        device, dtype, fill, CopyStream(device), has_master(plan.training.optimizer, dtype.itemsize)
    )
    store = ParamAndGradStore(
        applied.modules,
        layouts,
        sums,
        mesh,
        plan.strategy.data,
        plan.shards_gradients,
        gradient_dtype,
        init,
        overlap,
        separate=applied.tied,
    )
    initial.clear()
    return applied, store


def _fill_initial(
    initial: Mapping[str, Tensor], replay: FillReplay, name: str, layout: Layout, local: Tensor
) -> None:
    """Fill this rank's slices of a parameter."""
    if name in replay.fills:
        for view, slices in layout.parts(local):
            replay.fill(view, slices, name, layout.shape)
    elif not initial[name].is_meta:
        layout.copy_slices(initial[name].detach(), local)


def _move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            kind = dtype if buffer.is_floating_point() else buffer.dtype
            if buffer.is_meta:
                setattr(module, name, torch.zeros(buffer.shape, dtype=kind, device=device))
            else:
                setattr(module, name, buffer.to(device, kind))
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:  # a rehearsal's: no code has moved it
                setattr(module, name, torch.zeros(value.shape, dtype=value.dtype, device=device))
