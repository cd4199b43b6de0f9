"""Applies a plan's strategy to its model, in one fixed order (torchtitan's `parallelize`).

pipeline stages -> kernels -> context -> tensor or operator strategies -> fp8 GEMMs -> experts ->
adapters (LoRA) -> 4-bit weights -> tiles -> activation checkpointing -> tied weights -> initial
weights -> data (ZeRO).

- Pipeline stages come first, so that no rank ever holds the whole model.
- Kernels come before anything is sharded: they replace what a seam runs, and an axis wraps or
  replaces the seam.
- Context replaces attention, which an operator strategy then wraps.
- Adapters are split as their layers are, and so come after the axes.
- Activation checkpointing wraps what a layer will run, and so comes after the axes.
- Weights are drawn once every layout is known, so that a rank draws only its shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from workbench.copy_stream import CopyStream
from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer, counter_normal
from workbench.models.counter_dropout import SampleIndices
from workbench.models.counter_normal import NormalDrawer
from workbench.models.host_counts import CountReader, start_reading
from workbench.models.seams import Attend
from workbench.models.weight_init import WeightInit
from workbench.parallel.activation_checkpointing import apply_activation_checkpointing
from workbench.parallel.activation_offload import ActivationOffload
from workbench.parallel.attention_heads import apply_head_rules
from workbench.parallel.context.apply_context import apply_context_parallel
from workbench.parallel.data.sharded_params import ParamInit
from workbench.parallel.data.tiled_linear import apply_tiling
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.expert.apply_expert import apply_expert_parallel, gradient_reduction_axes
from workbench.parallel.expert.aux_loss import AuxLossCarrier
from workbench.parallel.four_bit.apply_four_bit import apply_four_bit
from workbench.parallel.four_bit.fill_four_bit import StoredWeight
from workbench.parallel.layout import Layout, Slices
from workbench.parallel.lora.apply_lora import apply_lora
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.apply_operators import (
    apply_operator_strategies,
    operator_reduction_axes,
)
from workbench.parallel.parallel_model import ParallelModel, StagePlacement
from workbench.parallel.python_model_stage import parallelize_python_model
from workbench.parallel.tensor.apply_tensor import apply_tensor_parallel, tensor_reduction_axes
from workbench.plan.model.four_bit_base import four_bit_format
from workbench.plan.optimizer_state import has_master
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import boundary_axes, placements
from workbench.plan.rules.strategy.recompute_rules import recomputed_modules
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh

TIED, TIE_OWNER = "head.weight", "embedding.tokens.weight"


def parallelize(
    plan: ResolvedPlan,
    mesh: Mesh,
    place: StagePlacement,
    count_reader: CountReader = start_reading,
    model: nn.Module | None = None,
    drawer: type[NormalDrawer] | None = NormalDrawer,
) -> ParallelModel:
    """Build a rank's stages of a plan's model, sharded as its strategy says.

    Args:
        plan: Resolved.
        mesh: The rank's place in it.
        place: The stages, and where they are built.
        count_reader: How MoE layers read counts of tokens; a rehearsal has no values to read.
        model: That of a plan whose model is Python code, if it is built already.
        drawer: Draws initial weights; None where a checkpoint is loaded over them.
    """
    drawing = None if drawer is None else drawer(place.device, _chunk_numel(plan))
    if plan.code:
        return parallelize_python_model(plan, plan.code, mesh, place, model, drawing)
    copies = CopyStream(place.device)
    built = _build_stages(plan, mesh, place, count_reader, copies)
    init = None
    if drawing is not None:
        norms = 0.0 if plan.shape.zero_centered_norms else 1.0
        init = WeightInit(plan.shape.layers, plan.training.seed, drawing, norms)
    tied = _tied_across_stages(plan, built.layouts, place)
    store = _store(plan, mesh, place, built, init, copies, tied)
    part = ParallelModel(
        built.models,
        store,
        tied,
        built.aux_loss,
        built.samples,
        None,
        built.offload,
        built.stored,
        place.dtype,
    )
    draws_frozen = drawing is not None and drawing.draws and not _loads_frozen(plan)
    if part.stored and init is not None and draws_frozen:
        part.fill_stored(partial(_draw_slices, init))
        store.gather_frozen()
    return part


def _loads_frozen(plan: ResolvedPlan) -> bool:
    """Whether frozen weights are loaded, and need no initial values."""
    return plan.finetune is not None and plan.finetune.base is not None


def _store(
    plan: ResolvedPlan,
    mesh: Mesh,
    place: StagePlacement,
    built: _BuiltStages,
    init: WeightInit | None,
    copies: CopyStream,
    tied: str | None,
) -> ParamAndGradStore:
    """Shard the stages' parameters over data parallelism, with initial weights."""
    optimizer, layouts = plan.training.optimizer, built.layouts
    partial_axes = _tensor_reduction_axes(layouts, plan, mesh)
    return ParamAndGradStore(
        built.models,
        layouts,
        gradient_reduction_axes(layouts, partial_axes, mesh),
        mesh,
        plan.strategy.data,
        plan.shards_gradients,
        place.gradient_dtype,
        ParamInit(
            place.device,
            place.dtype,
            None if init is None else partial(_draw_shard, init),
            copies,
            has_master(optimizer, place.dtype.itemsize),
            optimizer.delayed_update,
        ),
        place.overlap,
        separate=tied,
        loads_frozen=_loads_frozen(plan),
    )


def _chunk_numel(plan: ResolvedPlan) -> int:
    """Numbers drawn at a time on the plan's device, which a rehearsal is not on."""
    on_cpu = plan.gpu.device == "cpu"
    return counter_normal.CPU_CHUNK_NUMEL if on_cpu else counter_normal.GPU_CHUNK_NUMEL


@dataclass
class _BuiltStages:
    """Stages on the meta device, everything but ZeRO applied."""

    offload: ActivationOffload | None
    aux_loss: AuxLossCarrier = field(default_factory=AuxLossCarrier)
    samples: SampleIndices = field(default_factory=SampleIndices)
    models: dict[int, Transformer] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    stored: dict[str, StoredWeight] = field(default_factory=dict)
    """Local name of each weight in 4 bits -> what it is."""


def _build_stages(
    plan: ResolvedPlan,
    mesh: Mesh,
    place: StagePlacement,
    count_reader: CountReader,
    copies: CopyStream,
) -> _BuiltStages:
    built = _BuiltStages(ActivationOffload(copies) if plan.strategy.offload_activations else None)
    for stage in place.stages:
        built.models[stage], layouts, stored = _build_stage(
            plan, mesh, stage, place.partition, count_reader, built.aux_loss, built.offload
        )
        built.models[stage].samples = built.samples
        built.layouts |= layouts
        built.stored |= stored
    _tie_weights(plan, built.models, built.layouts)
    return built


def _build_stage(
    plan: ResolvedPlan,
    mesh: Mesh,
    stage: int,
    partition: list[int],
    count_reader: CountReader,
    aux_loss: AuxLossCarrier,
    offload: ActivationOffload | None,
) -> tuple[Transformer, dict[str, Layout], dict[str, StoredWeight]]:
    """A stage on the meta device, everything but ZeRO applied, its parameters' layouts, and its
    weights in 4 bits.
    """
    with torch.device("meta"):
        model = Transformer(
            plan.shape, plan.training.dropout, plan.training.seed, _layers_of(stage, partition)
        )
    model.attach_aux_loss = aux_loss
    keep_pipeline_stage(model, stage, partition)
    replace_seams(model, plan.strategy.kernels, plan.gpu.device)
    for seam in (module for module in model.modules() if isinstance(module, Attend)):
        seam.kernel = plan.strategy.attention
    min_fused_logits = getattr(model.head, "plain_below", 0)
    layouts = _unsharded_layouts(model)
    if mesh["context"].size > 1:
        apply_context_parallel(
            model, mesh["context.ring"], mesh["context.ulysses"], plan.training.sequence_length
        )
    if plan.strategy.operators:
        least = operator_mesh(plan).redistribution
        own, boundary = placements(plan), boundary_axes(plan)
        apply_operator_strategies(model, layouts, own, mesh, least, boundary)
    else:
        apply_tensor_parallel(model, layouts, plan, mesh)
        apply_head_rules(model, mesh)
    if plan.strategy.precision == "fp8":
        # Imported only here: torchao takes seconds.
        from workbench.parallel.float8.apply_float8 import apply_float8

        apply_float8(model, mesh)
    apply_expert_parallel(model, layouts, mesh, plan.strategy.tensor.sequence, count_reader)
    if plan.lora:
        kernels, device = plan.strategy.kernels, plan.gpu.device
        apply_lora(model, layouts, plan.lora, plan.training.seed, kernels, device)
    stored: dict[str, StoredWeight] = {}
    if (form := four_bit_format(plan)) is not None:
        stored = apply_four_bit(model, layouts, form, plan.strategy.kernels)
    recomputed = recomputed_modules(plan.strategy.recompute, plan.shape)
    apply_tiling(model, layouts, plan.strategy.data.tile_factor, recomputed)
    apply_activation_checkpointing(model, recomputed, offload)
    if model.head is not None:  # vocabulary parallelism has replaced the head that had them
        model.head.kernels = plan.strategy.kernels  # type: ignore[assignment]
        model.head.plain_below = min_fused_logits  # type: ignore[assignment]
    return model, layouts, stored


def _layers_of(stage: int, partition: list[int]) -> range:
    """Indices of a stage's blocks."""
    starts = [0, *accumulate(partition)]
    return range(starts[stage], starts[stage + 1])


def keep_pipeline_stage(model: Transformer, stage: int, partition: list[int]) -> None:
    """Remove from `model`, in place, whatever is not of `stage`.

    The embedding belongs to the first stage, the final norm and the head to the last.

    Args:
        partition: Number of blocks of every stage.
    """
    own = _layers_of(stage, partition)
    for index in list(model.blocks):
        if int(index) not in own:
            del model.blocks[index]
    if stage > 0:
        model.embedding = None
    if stage < len(partition) - 1:
        model.final_norm = model.head = None


def _tensor_reduction_axes(
    layouts: dict[str, Layout], plan: ResolvedPlan, mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    if plan.strategy.operators:
        return operator_reduction_axes(layouts, placements(plan), mesh)
    return tensor_reduction_axes(layouts.items(), plan, mesh)


def _unsharded_layouts(model: Transformer) -> dict[str, Layout]:
    layouts = {
        n: Layout.unsharded(n, tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    if model.shape.tied and TIED in layouts:
        layouts[TIED] = Layout.unsharded(TIE_OWNER, layouts[TIED].shape, replica=True)
    return layouts


def _draw_shard(init: WeightInit, _: str, layout: Layout, local: torch.Tensor) -> None:
    """Draw the slices of a global tensor that this rank holds; padding stays zero."""
    for view, slices in layout.parts(local):
        init.fill(view, slices, layout.name, layout.shape)


def _draw_slices(
    init: WeightInit, into: torch.Tensor, name: str, shape: tuple[int, ...], slices: Slices
) -> None:
    init.fill(into, slices, name, shape)


def _tie_weights(
    plan: ResolvedPlan, stages: dict[int, Transformer], layouts: dict[str, Layout]
) -> None:
    """Tie embedding and head again, after they were replaced, where one rank holds both."""
    embedding = next((m.embedding for m in stages.values() if m.embedding is not None), None)
    head = next((m.head for m in stages.values() if m.head is not None), None)
    if plan.shape.tied and embedding is not None and head is not None:
        head.weight = embedding.tokens.weight  # type: ignore[assignment]
        del layouts[TIED]


def _tied_across_stages(
    plan: ResolvedPlan, layouts: dict[str, Layout], place: StagePlacement
) -> str | None:
    """Local name of the tied weight, if its other copy is on another rank."""
    has_both_ends = {0, len(place.partition) - 1} <= set(place.stages)
    if not plan.shape.tied or has_both_ends:
        return None
    return next((name for name, layout in layouts.items() if layout.name == TIE_OWNER), None)
