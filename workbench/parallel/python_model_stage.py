"""A user's Python model as a single stage: data parallelism, ZeRO and operator strategies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from workbench.copy_stream import CopyStream
from workbench.models.counter_dropout import SampleIndices
from workbench.models.counter_normal import NormalDrawer
from workbench.models.deferred_init import FillReplay, RecordedFill, build_deferred
from workbench.models.python_model import add_loss, build_python_model
from workbench.parallel.data.sharded_params import ParamInit
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.expert.aux_loss import AuxLossCarrier
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.parallel.operators.apply_traced import AppliedTrace, apply_traced
from workbench.parallel.operators.traced_module import TracedModule, trace_for_plan
from workbench.parallel.parallel_model import ParallelModel, StagePlacement
from workbench.plan.optimizer_state import has_master
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import PythonModel
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh


def parallelize_python_model(
    plan: ResolvedPlan,
    code: PythonModel,
    mesh: Mesh,
    place: StagePlacement,
    model: nn.Module | None,
    drawing: NormalDrawer | None,
) -> ParallelModel:
    """Shard a user's model, in place.

    Parameters and buffers are then on the device in the dtype of `place`: as the factory has
    initialized them; zero where they are on the meta device and nothing is recorded that fills
    them.

    Args:
        plan: Resolved.
        code: Its model.
        mesh: The rank's place in it.
        place: The stages of this rank, and where they are built.
        model: If it is built already: unsharded, in host memory or on the meta device.
        drawing: Fills parameters whose initialization was recorded; None where a checkpoint is
            loaded over all of them.

    Raises:
        PlanError: Where a strategy names what the module does not have.
    """
    seed, samples = plan.training.seed, SampleIndices()
    fills: Mapping[str, RecordedFill] = {}
    if model is None:
        model, fills = _built(code, seed)
    traced = trace_for_plan(model, plan, place.dtype)
    initial = dict(model.named_parameters())
    layouts = {name: Layout.unsharded(name, tuple(value.shape)) for name, value in initial.items()}
    applied = _applied(plan, mesh, place, model, traced, layouts, samples)
    fill = None
    if drawing is not None:
        fill = partial(_fill_initial, initial, FillReplay(fills, seed, drawing))
    master = has_master(plan.training.optimizer, place.dtype.itemsize)
    store = ParamAndGradStore(
        applied.modules,
        layouts,
        {name: (*axes, mesh["replicas"]) for name, axes in applied.summed.items()},
        mesh,
        plan.strategy.data,
        plan.shards_gradients,
        place.gradient_dtype,
        ParamInit(place.device, place.dtype, fill, CopyStream(place.device), master),
        place.overlap,
        separate=applied.tied,
    )
    initial.clear()
    boundary = applied.boundary
    return ParallelModel(applied.modules, store, applied.tied, AuxLossCarrier(), samples, boundary)


def _built(code: PythonModel, seed: int) -> tuple[nn.Module, Mapping[str, RecordedFill]]:
    """A user's model, without values where they can be recorded; and what fills those."""
    build = partial(build_python_model, code, seed)
    return build_deferred(build) or (build(), {})


def _applied(
    plan: ResolvedPlan,
    mesh: Mesh,
    place: StagePlacement,
    model: nn.Module,
    traced: TracedModule | None,
    layouts: dict[str, Layout],
    samples: SampleIndices,
) -> AppliedTrace:
    """The rank's stages of `model`, operator strategies applied, buffers where they are used."""
    applied = AppliedTrace({0: model}, dict.fromkeys(layouts, ()), ())
    if traced is not None:
        least = operator_mesh(plan).redistribution if mesh.operators is not None else None
        seed = plan.training.seed
        applied = apply_traced(model, traced, layouts, mesh, least, samples, seed, place.stages)
    else:
        add_loss(model, plan.vocab)
    for module in applied.modules.values():
        _move_buffers(module, place.device, place.dtype)
    return applied


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
