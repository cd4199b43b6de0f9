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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from workbench.adapters.four_bit_tensor import PARTS
from workbench.copy_stream import CopyStream
from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer, counter_normal
from workbench.models.counter_dropout import SampleIndices
from workbench.models.counter_normal import NormalDrawer
from workbench.models.deferred_init import FillReplay, RecordedFill, build_deferred
from workbench.models.host_counts import CountReader, start_reading
from workbench.models.python_model import build_python_model
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
from workbench.parallel.four_bit.fill_four_bit import (
    ReadSlices,
    StoredMatrix,
    StoredWeight,
    fill_four_bit,
    stored_matrices,
)
from workbench.parallel.layout import Layout, Slices
from workbench.parallel.lora.apply_lora import apply_lora
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.apply_operators import (
    apply_operator_strategies,
    operator_reduction_axes,
)
from workbench.parallel.python_model_stage import apply_to_python_model
from workbench.parallel.tensor.apply_tensor import apply_tensor_parallel, tensor_reduction_axes
from workbench.plan.model.four_bit_base import four_bit_format
from workbench.plan.optimizer_state import has_master
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import boundary_axes, placements
from workbench.plan.rules.strategy.recompute_rules import recomputed_modules
from workbench.plan.schema import PythonModel
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh

TIED, TIE_OWNER = "head.weight", "embedding.tokens.weight"


@dataclass
class ParallelModel:
    """A rank's part of the model: its pipeline stages, and their parameters and gradients."""

    stages: Mapping[int, nn.Module]
    store: ParamAndGradStore
    tied_across_stages: str | None
    """Local name of a weight that the first and the last stage share, if this rank has one of the
    two and another rank the other.
    """
    aux_loss: AuxLossCarrier
    """Aux losses of the stages without the head."""
    samples: SampleIndices
    """Which samples the stages see, for dropout."""
    boundary: tuple[int, ...] | None = None
    """Local shape of what passes between stages, where the plan's shape does not say it."""
    activation_offload: ActivationOffload | None = None
    """Host memory of recomputed layers' inputs."""

    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    """Local name of each weight in 4 bits -> what it is."""
    dtype: torch.dtype = torch.float32
    """Of parameters."""

    @property
    def stored_parts(self) -> set[str]:
        """Local names of the parameters that are their bytes."""
        return {f"{name}.{part}" for name in self.stored for part in PARTS}

    def fill_stored(self, read: ReadSlices) -> None:
        """Fill this rank's shards of weights in 4 bits, which `gather_frozen` gathers.

        Args:
            read: Reads or draws values of a weight, in the parameters' dtype: they are rounded as
                those of an unquantized base.
        """
        fill_four_bit(self.stored_matrices(), read, self.dtype)

    def stored_matrices(self) -> Iterator[StoredMatrix]:
        """What this rank's shards hold of weights in 4 bits."""
        store = self.store
        return stored_matrices(store.frozen_values, store.frozen_layouts, self.stored)

    @property
    def head(self) -> nn.Module | None:
        """The head, if this rank holds it."""
        ours = (stage for stage in self.stages.values() if isinstance(stage, Transformer))
        return next((stage.head for stage in ours if stage.head is not None), None)


def parallelize(
    plan: ResolvedPlan,
    mesh: Mesh,
    stages: Sequence[int],
    partition: list[int],
    overlap: bool,
    device: torch.device,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    count_reader: CountReader = start_reading,
    model: nn.Module | None = None,
    drawer: type[NormalDrawer] | None = NormalDrawer,
) -> ParallelModel:
    """Build this rank's `stages` of a plan's model, sharded as its strategy says.

    Args:
        plan: Resolved.
        stages: Pipeline stages of this rank.
        partition: Number of layers of every stage of the pipeline.
        overlap: Whether gradients are reduced during backward: a gradient is complete as soon as
            the last backward has made it.
        device: Where parameters live.
        dtype: Of parameters.
        gradient_dtype: Of accumulated and reduced gradients.
        count_reader: How MoE layers read counts of tokens; a rehearsal has no values to read.
        model: That of a plan whose model is Python code, if it is built already.
        drawer: Draws initial weights; None where a checkpoint is loaded over them.
    """
    drawing = None if drawer is None else drawer(device, _chunk_numel(plan))
    aux_loss, samples = AuxLossCarrier(), SampleIndices()
    if plan.code:
        fills: Mapping[str, RecordedFill] = {}
        if model is None:
            model, fills = _python_model(plan.code, plan.training.seed)
        replay = None if drawing is None else FillReplay(fills, plan.training.seed, drawing)
        applied, store = apply_to_python_model(
            model, plan, mesh, overlap, device, dtype, gradient_dtype, replay, samples, stages
        )
        return ParallelModel(
            applied.modules, store, applied.tied, aux_loss, samples, applied.boundary
        )
    copies = CopyStream(device)
    offload = ActivationOffload(copies) if plan.strategy.offload_activations else None
    built: dict[int, Transformer] = {}
    layouts: dict[str, Layout] = {}
    stored: dict[str, StoredWeight] = {}
    for stage in stages:
        built[stage], own, of_stage = _build_stage(
            plan, mesh, stage, partition, count_reader, aux_loss, offload
        )
        built[stage].samples = samples
        layouts |= own
        stored |= of_stage
    _tie_weights(plan, built, layouts)
    tied = _tied_across_stages(plan, layouts, {0, len(partition) - 1} <= set(stages))
    fill = None
    if drawing is not None:
        norms = 0.0 if plan.shape.zero_centered_norms else 1.0
        init = WeightInit(plan.shape.layers, plan.training.seed, drawing, norms)
        fill = partial(_draw_shard, init)
    master = has_master(plan.training.optimizer, dtype.itemsize)
    loads_frozen = plan.finetune is not None and plan.finetune.base is not None
    store = ParamAndGradStore(
        built,
        layouts,
        gradient_reduction_axes(layouts, _tensor_reduction_axes(layouts, plan, mesh), mesh),
        mesh,
        plan.strategy.data,
        plan.shards_gradients,
        gradient_dtype,
        ParamInit(device, dtype, fill, copies, master, plan.training.optimizer.delayed_update),
        overlap,
        separate=tied,
        loads_frozen=loads_frozen,
    )
    part = ParallelModel(built, store, tied, aux_loss, samples, None, offload, stored, dtype)
    if stored and drawing is not None and drawing.draws and not loads_frozen:
        part.fill_stored(partial(_draw_slices, init))
        store.gather_frozen()
    return part


def _chunk_numel(plan: ResolvedPlan) -> int:
    """Numbers drawn at a time on the plan's device, which a rehearsal is not on."""
    on_cpu = plan.gpu.device == "cpu"
    return counter_normal.CPU_CHUNK_NUMEL if on_cpu else counter_normal.GPU_CHUNK_NUMEL


def _python_model(code: PythonModel, seed: int) -> tuple[nn.Module, Mapping[str, RecordedFill]]:
    """A user's model, without values where they can be recorded; and what fills those."""
    build = partial(build_python_model, code, seed)
    return build_deferred(build) or (build(), {})


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
        apply_lora(model, layouts, plan.lora, plan.training.seed)
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
    plan: ResolvedPlan, layouts: dict[str, Layout], has_both_ends: bool
) -> str | None:
    """Local name of the tied weight, if its other copy is on another rank."""
    if not plan.shape.tied or has_both_ends:
        return None
    return next((name for name, layout in layouts.items() if layout.name == TIE_OWNER), None)
