"""Apply low-rank adapters (LoRA) to a stage whose layers are sharded already.

An adapter is split with its layer. Of a column-parallel layer `lora_b` is sharded by outputs as the
weight is, of a row-parallel one `lora_a` by inputs; the other of the two every tensor rank has, and
its gradient is partial: it is summed once a step (`gradient_reduction_axes`). No collective is
added, but with sequence parallelism one of [tokens, rank] where a region begins.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from workbench.adapters.lora_linear import LORA_A, LORA_B, adapt, freeze
from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer
from workbench.models.grouped_gemm import GroupedLinear
from workbench.parallel.expert.apply_expert import PartialLinear
from workbench.parallel.layout import Layout
from workbench.parallel.tensor.column_parallel import (
    ColumnParallelLinear,
    UngroupedColumnParallelLinear,
)
from workbench.parallel.tensor.row_parallel import RowParallelLinear
from workbench.plan.model.block_linears import ROW_PARALLEL, is_adapted
from workbench.plan.schema import Lora

LINEARS = (
    nn.Linear,
    GroupedLinear,
    ColumnParallelLinear,
    UngroupedColumnParallelLinear,
    RowParallelLinear,
    PartialLinear,
)


def apply_lora(
    model: Transformer, layouts: dict[str, Layout], lora: Lora, seed: int, kernels: str, device: str
) -> None:
    """Give a stage's layers adapters and freeze all else, in place; record the adapters' layouts.

    Args:
        model: A stage, on the meta device, every axis but data parallelism applied.
        layouts: Local parameter name -> layout; updated.
        lora: The plan's adapters.
        seed: Of their dropout.
        kernels: What drops: eager, compiled or fused.
        device: The plan's device type: cuda or cpu.
    """
    freeze(model)
    for path, module in list(model.named_modules()):
        if not isinstance(module, LINEARS) or not is_adapted(path, lora):
            continue
        a, b = adapter_layouts(path, layouts[f"{path}.weight"], lora.rank)
        adapter = adapt(model, path, module, lora, a.local_shape, b.local_shape, seed)
        adapter.dropout.first_channel = a.slices[-1][0]
        replace_seams(adapter.dropout, kernels, device)
        layouts[f"{path}.{LORA_A}"], layouts[f"{path}.{LORA_B}"] = a, b


def adapter_layouts(path: str, weight: Layout, rank: int) -> tuple[Layout, Layout]:
    """Layouts of `lora_a` and `lora_b` of the layer at `path`, from that of its weight."""
    is_row_parallel = path.rpartition(".")[2] in ROW_PARALLEL
    last = len(weight.shape) - 1
    a = _with_rank(weight, f"{path}.{LORA_A}", last - 1, rank)
    b = _with_rank(weight, f"{path}.{LORA_B}", last, rank)
    if "tensor" in weight.replicated_over:
        return a, b
    replicated = ("tensor", *weight.replicated_over)
    if is_row_parallel:
        return a, replace(b, replicated_over=replicated, replica=False)
    return replace(a, replicated_over=replicated, replica=False), b


def _with_rank(weight: Layout, name: str, dim: int, rank: int) -> Layout:
    """The layout of a weight whose `dim` is an adapter's rank."""
    return replace(
        weight,
        name=name,
        shape=(*weight.shape[:dim], rank, *weight.shape[dim + 1 :]),
        slices=(*weight.slices[:dim], (0, rank), *weight.slices[dim + 1 :]),
        padding=(*weight.padding[:dim], 0, *weight.padding[dim + 1 :]),
        strided=tuple(run for run in weight.strided if run[0] != dim),
    )
