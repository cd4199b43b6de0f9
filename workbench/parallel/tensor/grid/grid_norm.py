"""RMSNorm and LayerNorm over a hidden width that a tensor grid shards.

Statistics are those of the whole width: forward and backward each need one small collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import at_least_fp32
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import all_gather, all_reduce


class GridParallelNorm(nn.Module):
    """The add_norm seam over a sharded width.

    Args:
        weight: [D / ranks].
        bias: [D / ranks] or None.
        kind: "rmsnorm" or "layernorm".
        width: D.
        axis: The grid axis that shards the width.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        kind: str,
        epsilon: float,
        width: int,
        axis: MeshAxis,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.kind = weight, bias, kind
        self.epsilon, self.width, self.axis = epsilon, width, axis

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), both [B, T, D / ranks]; without a residual the sum is x itself."""
        total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
        norm = _RmsNorm if self.kind == "rmsnorm" else _LayerNorm
        return norm.apply(total, self.weight, self.bias, self.epsilon, self.width, self.axis), total


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight (1910.07467), computed in fp32 or better."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_D: Tensor,
        bias: None,
        epsilon: float,
        width: int,
        axis: MeshAxis,
    ) -> Tensor:
        upcast = at_least_fp32(x_BTD)
        squares_BT1 = all_reduce(upcast.square().sum(-1, keepdim=True), axis)
        scale_BT1 = squares_BT1.div_(width).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        ctx.width, ctx.axis = width, axis
        return (upcast * scale_BT1).to(x_BTD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        gradient = at_least_fp32(gradient_BTD)
        unit = at_least_fp32(x_BTD) * scale_BT1
        weight_gradient = (gradient * unit).flatten(0, -2).sum(0)
        x_gradient = gradient * weight_D
        projection_BT1 = all_reduce((x_gradient * unit).sum(-1, keepdim=True), ctx.axis).div_(
            ctx.width
        )
        x_gradient.sub_(unit.mul_(projection_BT1)).mul_(scale_BT1)
        return (
            x_gradient.to(x_BTD.dtype),
            weight_gradient.to(weight_D.dtype),
            None,
            None,
            None,
            None,
        )


class _LayerNorm(torch.autograd.Function):
    """y = (x - mean) / deviation * weight + bias (1607.06450), computed in fp32 or better.

    Ranks all-gather the means and variances of their shards. Sums and sums of squares could be
    all-reduced, but the variance as their difference would lose all digits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        epsilon: float,
        width: int,
        axis: MeshAxis,
    ) -> Tensor:
        upcast = at_least_fp32(x_BTD)
        mean_BT1, scale_BT1 = _statistics(upcast, epsilon, axis)
        ctx.save_for_backward(x_BTD, weight_D, mean_BT1, scale_BT1)
        ctx.width, ctx.axis = width, axis
        return ((upcast - mean_BT1).mul_(scale_BT1).mul_(weight_D).add_(bias_D)).to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_D, mean_BT1, scale_BT1 = ctx.saved_tensors
        gradient = at_least_fp32(gradient_BTD)
        unit = (at_least_fp32(x_BTD) - mean_BT1).mul_(scale_BT1)
        weight_gradient = (gradient * unit).flatten(0, -2).sum(0).to(weight_D.dtype)
        bias_gradient = gradient.flatten(0, -2).sum(0).to(weight_D.dtype)
        x_gradient = gradient * weight_D
        sums = torch.stack(
            (x_gradient.sum(-1, keepdim=True), (x_gradient * unit).sum(-1, keepdim=True))
        )
        mean_BT1, projection_BT1 = all_reduce(sums, ctx.axis).div_(ctx.width)
        x_gradient.sub_(mean_BT1).sub_(unit.mul_(projection_BT1)).mul_(scale_BT1)
        return x_gradient.to(x_BTD.dtype), weight_gradient, bias_gradient, None, None, None


def _statistics(x_BTD: Tensor, epsilon: float, axis: MeshAxis) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of every token [B, T, 1], from those of the shards."""
    variance, mean = torch.var_mean(x_BTD, -1, correction=0, keepdim=True)
    variances, means = all_gather(torch.stack((variance, mean))[None], axis).unbind(1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square_().mean(0)
    return mean, variance.add_(epsilon).rsqrt_()
