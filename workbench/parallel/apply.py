"""A plan's strategy applied to its model, in one fixed order.

partition into stages -> tensor -> initial weights -> data. Stages come first, so that no rank ever holds the
whole model; weights come once every layout is known, so that a rank draws only what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from workbench.models import Transformer
from workbench.models.initialise import initial_value
from workbench.parallel.data.buckets import GradientBuckets
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.parallel.pipeline.stage import keep_stage
from workbench.parallel.tensor.apply import MEGATRON, split_modules
from workbench.plan.schema import Plan

TIED, TIE_OWNER = "head.weight", "embedding.tokens.weight"


@dataclass
class Parallelised:
    """A rank's part of the model: parameters and layouts by local name, gradients in buckets."""

    model: Transformer
    parameters: dict[str, nn.Parameter]
    layouts: dict[str, Layout]
    buckets: GradientBuckets
    tied_across_stages: str | None
    """Local name of a weight that the first and the last stage both hold, where this rank is one of them."""


def parallelise(
    plan: Plan, mesh: Mesh, device: torch.device, dtype: torch.dtype, gradient_dtype: torch.dtype
) -> Parallelised:
    """Build this rank's part of a complete plan's model. Parameters on `device` in `dtype`."""
    with torch.device("meta"):
        model = Transformer(plan.shape)
    partition = plan.strategy.pipeline.partition
    assert isinstance(partition, list)
    keep_stage(model, mesh["pipeline"].index, partition)
    layouts = _layouts(model)
    if mesh["tensor"].size > 1:
        split_modules(model, layouts, MEGATRON, mesh["tensor"])
    _materialise(model, layouts, plan, device, dtype)
    _tie(model, layouts)
    parameters = dict(model.named_parameters())
    buckets = GradientBuckets(
        parameters,
        gradient_dtype,
        mesh["data"],
        plan.strategy.data.bucket_mib * 2**20,
        overlap=mesh["pipeline"].size == 1,
    )
    tied = next((n for n, layout in layouts.items() if plan.shape.tied and layout.name == TIE_OWNER), None)
    return Parallelised(model, parameters, layouts, buckets, tied if mesh["pipeline"].size > 1 else None)


def _layouts(model: Transformer) -> dict[str, Layout]:
    layouts = {n: Layout.whole(n, tuple(p.shape)) for n, p in model.named_parameters(remove_duplicate=False)}
    if model.shape.tied and TIED in layouts:
        layouts[TIED] = Layout.whole(TIE_OWNER, layouts[TIED].shape, replica=True)
    return layouts


def _materialise(
    model: nn.Module, layouts: dict[str, Layout], plan: Plan, device: torch.device, dtype: torch.dtype
) -> None:
    for path, layout in layouts.items():
        owner_path, _, name = path.rpartition(".")
        module = model.get_submodule(owner_path)
        whole = initial_value(layout.name, layout.shape, plan.shape.layers, plan.training.seed, dtype)
        setattr(module, name, nn.Parameter(layout.take(whole).to(device)))


def _tie(model: Transformer, layouts: dict[str, Layout]) -> None:
    """Make embedding and head share one parameter again, where one stage holds both."""
    if model.shape.tied and model.embedding is not None and model.head is not None:
        model.head.weight = model.embedding.tokens.weight  # type: ignore[assignment]
        del layouts[TIED]
