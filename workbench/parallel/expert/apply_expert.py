"""Apply expert parallelism to MoE layers: experts over the expert axis, their width over tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from workbench.adapters.four_bit_tensor import FrozenWeight
from workbench.adapters.frozen_linear import frozen_linear
from workbench.adapters.lora_linear import LoraAdapter, is_adapter
from workbench.models import Transformer
from workbench.models.host_counts import CountReader
from workbench.models.moe import MoE
from workbench.parallel.data.flat_buckets import ReductionAxes
from workbench.parallel.expert.aux_loss import scale_gradient
from workbench.parallel.expert.expert_collectives import all_reduce_counts
from workbench.parallel.expert.token_dispatch import AllToAllDispatcher
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import GRADIENT_GROUP_SUFFIX, Mesh, MeshAxis
from workbench.parallel.tensor.tensor_collectives import (
    copy_to_tensor_region,
    gather_tokens,
    reduce_from_tensor_region,
    scatter_tokens,
)

EXPERT_SPLIT_DIMS = {
    "gate.weight": 0,
    "up.weight": 0,
    "gate.bias": 0,
    "up.bias": 0,
    "down.weight": 1,
}
"""Parameter of a feed-forward layer -> the dim that the tensor axis splits (column- and
row-parallel, arXiv 1909.08053); stacked experts have one dim more in front.
"""

PARTIAL_OVER_WIDTH = (".route.weight", ".experts.down.bias", ".shared.down.bias")
"""Ends of the names of parameters of an MoE layer that every rank has unsharded, and of whose
gradients each shard of the width has a part, for the layer's output is a sum over these shards.
"""
PARTIAL_GRADIENTS = (*PARTIAL_OVER_WIDTH, ".q_norm.weight", ".k_norm.weight")
"""The same of parameters whose gradient is a sum over the tensor ranks, where every rank has them:
also norms of a rank's heads.
"""


def apply_expert_parallel(
    model: Transformer,
    layouts: dict[str, Layout],
    mesh: Mesh,
    sequence: bool,
    read_counts: CountReader,
) -> None:
    """Shard the MoE layers of a model, in place, and record their parameters' new layouts.

    With operator strategies an MoE layer is an operator (`moe_operator`), and its width is sharded
    already. Else, on the tensor axis, it is one parallel region: its input is copied (with sequence
    parallelism all-gathered), and the partial results of routed and shared experts are all-reduced
    (reduce-scattered) once. All of its gradients are then partial, the router's too:
    `gradient_reduction_axes` says so.

    Args:
        model: A stage, on the meta device.
        layouts: Local parameter name -> layout; updated.
        sequence: Whether the tensor axis uses sequence parallelism.
        read_counts: Turns row counts on the device into integers.
    """
    for path, moe in model.named_modules():
        if isinstance(moe, MoE):
            moe.dispatcher.read_counts = read_counts
            if mesh["expert"].size > 1:
                _shard_over_experts(path, moe, layouts, mesh, read_counts)
            if mesh["context"].size > 1:
                moe.route.reduce_counts = partial(all_reduce_counts, axis=mesh["context"])
            if mesh["tensor"].size > 1 and mesh.operators is None:
                axis = mesh["tensor"]
                shard_expert_width(path, moe, layouts, partial(_split, axis), axis.size)
                moe.register_forward_pre_hook(
                    partial(_enter_tensor_region, mesh["tensor"], sequence)
                )
                moe.register_forward_hook(partial(_leave_tensor_region, mesh["tensor"], sequence))


def gradient_reduction_axes(
    layouts: Mapping[str, Layout], tensor: ReductionAxes, mesh: Mesh
) -> ReductionAxes:
    """Local parameter name -> the axes over which its gradient is summed, data parallelism last.

    An expert has seen the tokens of all expert ranks already, so that only ranks with the same
    experts sum its gradient. The gradients of a router, of a bias that every tensor rank adds a
    share of, of norms of a rank's heads, and of what adapters of sharded layers have on every rank,
    are partial on the tensor ranks.

    Args:
        tensor: The tensor axes over which a parameter's gradient is summed.
    """
    sums: dict[str, tuple[MeshAxis, ...]] = {}
    tensor_axis = mesh.axes.get("tensor" + GRADIENT_GROUP_SUFFIX, mesh["tensor"])
    for name, layout in layouts.items():
        data = (
            mesh["expert_replicas"]
            if "expert_replicas" in layout.replicated_over
            else mesh["replicas"]
        )
        partial = "tensor" in layout.replicated_over and name.endswith(PARTIAL_GRADIENTS)
        partial = partial or _is_shared_by_columns_or_rows(name, layouts)
        partial = partial and mesh.operators is None and tensor_axis.size > 1
        sums[name] = (tensor_axis, data) if partial else (*tensor[name], data)
    return sums


def _is_shared_by_columns_or_rows(name: str, layouts: Mapping[str, Layout]) -> bool:
    """Whether a parameter is the part of an adapter that every tensor rank has beside its columns
    or rows of the weight.
    """
    if not is_adapter(name) or "tensor" not in layouts[name].replicated_over:
        return False
    weight = layouts[f"{name.rpartition('.')[0]}.weight"]
    return "tensor" not in weight.replicated_over


def _shard_over_experts(
    path: str, moe: MoE, layouts: dict[str, Layout], mesh: Mesh, read_counts: CountReader
) -> None:
    moe.dispatcher = AllToAllDispatcher(read_counts, mesh["expert"])
    for name, _ in list(moe.experts.named_parameters()):
        key = f"{path}.experts.{name}"
        layout = layouts[key].sharded_over("replicas", but=("expert", "expert_replicas"))
        _replace_parameter(moe.experts, name, layouts, key, layout.split(0, mesh["expert"]))


def _split(axis: MeshAxis, layout: Layout, dim: int) -> Layout:
    return layout.split(dim, axis)


def shard_expert_width(
    path: str,
    moe: MoE,
    layouts: dict[str, Layout],
    split: Callable[[Layout, int], Layout],
    num_shards: int,
) -> None:
    """Shard the width of a layer's experts, in place; their outputs are then partial sums.

    Args:
        path: Of the layer in the model.
        layouts: Local parameter name -> layout; updated.
        split: Shards a layout along a dim.
        num_shards: Into how many.
    """
    for group, owner in (("experts", moe.experts), ("shared", moe.shared)):
        for name, _ in [] if owner is None else list(owner.named_parameters()):
            if name in EXPERT_SPLIT_DIMS:
                assert owner is not None
                key, stacked = f"{path}.{group}.{name}", group == "experts"
                layout = split(layouts[key], EXPERT_SPLIT_DIMS[name] + stacked)
                _replace_parameter(owner, name, layouts, key, layout)
    moe.experts.down.bias_share = 1 / num_shards
    if moe.shared is not None:
        down = moe.shared.down
        assert isinstance(down, nn.Linear)
        moe.shared.down = PartialLinear(down, 1 / num_shards)


def _replace_parameter(
    owner: nn.Module, name: str, layouts: dict[str, Layout], key: str, layout: Layout
) -> None:
    module, _, last = name.rpartition(".")
    layouts[key] = layout
    setattr(
        owner.get_submodule(module),
        last,
        nn.Parameter(torch.empty(layout.local_shape, device="meta")),
    )


class PartialLinear(nn.Module):
    """A row-parallel linear layer without its all-reduce: the MoE layer reduces once, after
    combine.

    Every rank adds `bias_share` of the bias, so that the sum has all of it.
    """

    def __init__(self, linear: nn.Linear, bias_share: float) -> None:
        super().__init__()
        self.weight: FrozenWeight = linear.weight
        self.bias, self.bias_share = linear.bias, bias_share
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / ranks] to this rank's partial sum of [..., out]."""
        bias = None if self.bias is None else self.bias * self.bias_share
        if self.lora is None:
            return frozen_linear(x, self.weight, bias)
        return self.lora.linear(x, self.weight, bias)


def _enter_tensor_region(
    axis: MeshAxis, sequence: bool, module: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    return (gather_tokens(inputs[0], axis) if sequence else copy_to_tensor_region(inputs[0], axis),)


def _leave_tensor_region(
    axis: MeshAxis,
    sequence: bool,
    module: nn.Module,
    inputs: tuple[Tensor],
    outputs: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    branch, aux_loss = outputs
    branch = scatter_tokens(branch, axis) if sequence else reduce_from_tensor_region(branch, axis)
    return branch, None if aux_loss is None else scale_gradient(aux_loss, 1 / axis.size)
