"""A plan's strategy applied to its model, in one fixed order.

partition into stages -> kernels -> tensor, or a strategy for each operator -> experts -> context ->
recomputation -> ties -> initial weights -> data. Stages come first, so that no rank ever holds the
whole model; kernels before anything is split, for they change what a seam runs, and an axis wraps
or replaces the seam; recomputation comes once a layer is what will run; weights come once every
layout is known, so that a rank draws only what it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer
from workbench.models.counter_dropout import Samples
from workbench.models.moe import Counting, counted
from workbench.models.python_model import build_python
from workbench.models.seams import Attend
from workbench.models.weight_init import initial_value
from workbench.parallel.activation_checkpointing import recompute
from workbench.parallel.context.apply_context import spread_sequence
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.expert.apply_expert import gradient_sums, spread_experts
from workbench.parallel.expert.auxiliary_loss import HandOn
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.apply_operators import operator_sums, split_operators
from workbench.parallel.pipeline.model_stages import keep_stage
from workbench.parallel.python_model_stage import plain_stage
from workbench.parallel.tensor.apply_tensor import split_tensors, tensor_sums
from workbench.plan.attention_kernel import repeats_heads
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.operator_rules import placements

TIED, TIE_OWNER = "head.weight", "embedding.tokens.weight"


@dataclass
class Parallelised:
    """A rank's part of the model: its stages, and the store of their parameters and gradients."""

    stages: Mapping[int, nn.Module]
    store: ParamAndGradStore
    tied_across_stages: str | None
    """Local name of a weight that the first and the last stage both hold, where this rank has one
    of them.
    """
    auxiliary: HandOn
    """Auxiliary losses of the stages without the head."""
    samples: Samples
    """Which samples the stages see."""

    @property
    def head(self) -> nn.Module | None:
        """The head, where this rank holds it."""
        ours = (stage for stage in self.stages.values() if isinstance(stage, Transformer))
        return next((stage.head for stage in ours if stage.head is not None), None)


def parallelise(
    plan: ResolvedPlan,
    mesh: Mesh,
    stages: Sequence[int],
    partition: list[int],
    overlap: bool,
    device: torch.device,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    counting: Counting = counted,
    model: nn.Module | None = None,
) -> Parallelised:
    """Build this rank's `stages` of a complete plan's model. Parameters on `device` in `dtype`.

    `partition` gives the layers of every stage; `overlap` says that a gradient is complete as soon
    as the last backward has made it; `model` is that of a plan whose model is code, where it is
    built already.
    """
    if plan.code:
        model = model or build_python(plan.code, plan.training.seed)
        kept = plain_stage(model, plan, mesh, overlap, device, dtype, gradient_dtype)
        return Parallelised({0: model}, kept, None, HandOn(), Samples())
    built: dict[int, Transformer] = {}
    auxiliary, samples = HandOn(), Samples()
    layouts: dict[str, Layout] = {}
    for stage in stages:
        built[stage], own = _stage(plan, mesh, stage, partition, counting)
        built[stage].hand_on, built[stage].samples = auxiliary, samples
        layouts |= own
    _tie(plan, built, layouts)
    tied = _tied_across_stages(plan, layouts, {0, len(partition) - 1} <= set(stages))
    store = ParamAndGradStore(
        built,
        layouts,
        gradient_sums(layouts, _sums(layouts, plan, mesh), mesh),
        mesh,
        plan.strategy.data,
        gradient_dtype,
        partial(_drawn, plan, layouts, device, dtype),
        overlap,
        separate=tied,
    )
    return Parallelised(built, store, tied, auxiliary, samples)


def _stage(
    plan: ResolvedPlan, mesh: Mesh, stage: int, partition: list[int], counting: Counting
) -> tuple[Transformer, dict[str, Layout]]:
    with torch.device("meta"):
        model = Transformer(plan.shape, plan.training.dropout, plan.training.seed)
    keep_stage(model, stage, partition)
    replace_seams(model, plan.strategy.kernels, plan.gpu.device)
    for seam in (module for module in model.modules() if isinstance(module, Attend)):
        seam.repeats_heads = repeats_heads(plan.gpu, plan.strategy.precision, plan.shape)
    plain_below = getattr(model.head, "plain_below", 0)
    layouts = _layouts(model)
    if plan.strategy.operators:
        split_operators(model, layouts, placements(plan), mesh)
    else:
        split_tensors(model, layouts, plan, mesh)
    spread_experts(model, layouts, mesh, plan.strategy.tensor.sequence, counting)
    if mesh["context"].size > 1:
        spread_sequence(
            model, mesh["context"], plan.strategy.context.algorithm, plan.training.sequence_length
        )
    recompute(model, plan.strategy.recompute)
    if model.head is not None:  # what splits the vocabulary has replaced it
        model.head.kernels = plan.strategy.kernels  # type: ignore[assignment]
        model.head.plain_below = plain_below  # type: ignore[assignment]
    return model, layouts


def _sums(
    layouts: dict[str, Layout], plan: ResolvedPlan, mesh: Mesh
) -> dict[str, tuple[MeshAxis, ...]]:
    if plan.strategy.operators:
        return operator_sums(layouts, placements(plan), mesh)
    return tensor_sums(layouts.items(), plan, mesh)


def _layouts(model: Transformer) -> dict[str, Layout]:
    layouts = {
        n: Layout.whole(n, tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    if model.shape.tied and TIED in layouts:
        layouts[TIED] = Layout.whole(TIE_OWNER, layouts[TIED].shape, replica=True)
    return layouts


def _drawn(
    plan: ResolvedPlan,
    layouts: dict[str, Layout],
    device: torch.device,
    dtype: torch.dtype,
    name: str,
) -> torch.Tensor:
    """The initial value of what this rank holds of a parameter."""
    layout = layouts[name]
    whole = initial_value(layout.name, layout.shape, plan.shape.layers, plan.training.seed, dtype)
    return layout.take(whole).to(device)


def _tie(plan: ResolvedPlan, stages: dict[int, Transformer], layouts: dict[str, Layout]) -> None:
    """Make embedding and head share one parameter again, where one rank holds both."""
    embedding = next((m.embedding for m in stages.values() if m.embedding is not None), None)
    head = next((m.head for m in stages.values() if m.head is not None), None)
    if plan.shape.tied and embedding is not None and head is not None:
        head.weight = embedding.tokens.weight  # type: ignore[assignment]
        del layouts[TIED]


def _tied_across_stages(plan: ResolvedPlan, layouts: dict[str, Layout], both: bool) -> str | None:
    """The tied weight's local name, where its other copy is on another rank and not `both` are
    here.
    """
    if not plan.shape.tied or both:
        return None
    return next((name for name, layout in layouts.items() if layout.name == TIE_OWNER), None)
