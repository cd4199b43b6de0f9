"""MoE layers as operators: sequences over some axes of the grid, the experts' width over others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.models.moe import MoE
from workbench.parallel.expert.apply_expert import shard_expert_width
from workbench.parallel.expert.aux_loss import scale_gradient
from workbench.parallel.layout import Layout
from workbench.parallel.operators.operator_forward import ForwardFn
from workbench.parallel.operators.operator_grid import OperatorGrid
from workbench.parallel.operators.redistribution import OperatorSharding


@dataclass(frozen=True)
class MoEOperator:
    """An MoE layer on this rank's sequences, with its share of each expert's width (all-reduced).

    Ranks that share the width route the same tokens and have partial sums, whose gradients are
    partial too: the router's, and the input's.

    Attributes:
        num_shards: Parts of the width.
    """

    forward: ForwardFn
    sharding: OperatorSharding
    num_shards: int

    def __call__(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] to the branch [B, T, D] and the aux loss of all sequences."""
        branch, aux_loss = self.forward(self.sharding.to_local(x_BTD, rows=0))
        branch = self.sharding.to_global(self.sharding.reduce_partial(branch, rows=0), rows=0)
        if aux_loss is None:
            return branch, None
        # Every rank of a width has the same aux loss, and the router's gradient is their sum.
        aux_loss = scale_gradient(aux_loss, 1 / self.num_shards)
        return branch, self.sharding.restricted_to("rows").reduce_partial(aux_loss)


def moe_operator(
    path: str,
    module: MoE,
    layouts: dict[str, Layout],
    sharding: OperatorSharding,
    grid: OperatorGrid,
) -> MoEOperator:
    """Shard the experts' width, in place, and record the new layouts; the forward of the layer."""
    axes = grid.over(sharding.placement, "width")
    num_shards = 1
    for axis in axes:
        num_shards *= axis.size

    def split(layout: Layout, dim: int) -> Layout:
        return grid.shard_over(layout, dim, axes)

    shard_expert_width(path, module, layouts, split, num_shards)
    return MoEOperator(module.forward, sharding, num_shards)
