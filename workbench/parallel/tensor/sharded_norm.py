"""RMSNorm over a width that tensor ranks share: the norm of all query or key heads (OLMo 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import at_least_fp32
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.tensor_collectives import all_reduce


class ShardedRmsNorm(nn.Module):
    """RMSNorm of entries of which this rank has a part; padding, which is zero, stays zero.

    Args:
        weight: Of this rank's entries.
        width: Entries over all ranks, without padding.
        epsilon: Added to the mean square.
        axis: The tensor axis.
    """

    def __init__(self, weight: nn.Parameter, width: int, epsilon: float, axis: MeshAxis) -> None:
        super().__init__()
        self.weight, self.width, self.epsilon, self.axis = weight, width, epsilon, axis

    def forward(self, x_BTD: Tensor, residual_BTD: None) -> tuple[Tensor, Tensor]:
        """(normalised, x) [B, T, D], as `AddNorm` without a residual."""
        normed: Tensor = _ShardedRmsNorm.apply(
            x_BTD, self.weight, self.width, self.epsilon, self.axis
        )
        return normed, x_BTD


class _ShardedRmsNorm(torch.autograd.Function):
    """`models.seams._RmsNorm`, whose two means over the width are sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_D: Tensor, width: int, epsilon: float, axis: MeshAxis
    ) -> Tensor:
        upcast = at_least_fp32(x_BTD)
        scale_BT1 = all_reduce(upcast.square().sum(-1, keepdim=True), axis)
        scale_BT1.div_(width).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        ctx.width, ctx.axis = width, axis
        return (upcast * scale_BT1).to(x_BTD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        gradient = at_least_fp32(gradient_BTD)
        unit = at_least_fp32(x_BTD) * scale_BT1
        weight_gradient = (gradient * unit).flatten(0, -2).sum(0)
        x_gradient = gradient * weight_D
        projection_BT1 = all_reduce((x_gradient * unit).sum(-1, keepdim=True), ctx.axis)
        projection_BT1.div_(ctx.width)
        x_gradient.sub_(unit.mul_(projection_BT1)).mul_(scale_BT1)
        gradients = x_gradient.to(x_BTD.dtype), weight_gradient.to(weight_D.dtype)
        return *gradients, None, None, None
