"""Norms over a hidden width that is split: their statistics are of all its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import at_least_fp32
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import all_gather, all_reduce


class SplitNorm(nn.Module):
    """The add_norm seam over [B, T, D / ranks]. Weight and bias [D / ranks]; `width` is D, split
    over `axis`.
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
        wide = at_least_fp32(x_BTD)
        squares_BT1 = all_reduce(wide.square().sum(-1, keepdim=True), axis)
        scale_BT1 = squares_BT1.div_(width).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        ctx.width, ctx.axis = width, axis
        return (wide * scale_BT1).to(x_BTD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        incoming = at_least_fp32(gradient_BTD)
        unit = at_least_fp32(x_BTD) * scale_BT1
        weight_gradient = (incoming * unit).flatten(0, -2).sum(0)
        outgoing = incoming * weight_D
        along_BT1 = all_reduce((outgoing * unit).sum(-1, keepdim=True), ctx.axis).div_(ctx.width)
        outgoing.sub_(unit.mul_(along_BT1)).mul_(scale_BT1)
        return outgoing.to(x_BTD.dtype), weight_gradient.to(weight_D.dtype), None, None, None, None


class _LayerNorm(torch.autograd.Function):
    """y = (x - mean) / deviation * weight + bias (1607.06450), computed in fp32 or better.

    The parts' means and squared deviations are gathered, not sums of squares, whose difference
    would cancel.
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
        wide = at_least_fp32(x_BTD)
        mean_BT1, scale_BT1 = _statistics(wide, epsilon, axis)
        ctx.save_for_backward(x_BTD, weight_D, mean_BT1, scale_BT1)
        ctx.width, ctx.axis = width, axis
        return ((wide - mean_BT1).mul_(scale_BT1).mul_(weight_D).add_(bias_D)).to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_D, mean_BT1, scale_BT1 = ctx.saved_tensors
        incoming = at_least_fp32(gradient_BTD)
        unit = (at_least_fp32(x_BTD) - mean_BT1).mul_(scale_BT1)
        weight_gradient = (incoming * unit).flatten(0, -2).sum(0).to(weight_D.dtype)
        bias_gradient = incoming.flatten(0, -2).sum(0).to(weight_D.dtype)
        outgoing = incoming * weight_D
        sums = torch.stack(
            (outgoing.sum(-1, keepdim=True), (outgoing * unit).sum(-1, keepdim=True))
        )
        mean_BT1, along_BT1 = all_reduce(sums, ctx.axis).div_(ctx.width)
        outgoing.sub_(mean_BT1).sub_(unit.mul_(along_BT1)).mul_(scale_BT1)
        return outgoing.to(x_BTD.dtype), weight_gradient, bias_gradient, None, None, None


def _statistics(wide_BTD: Tensor, epsilon: float, axis: MeshAxis) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of every token [B, T, 1], from those of the parts."""
    variance, mean = torch.var_mean(wide_BTD, -1, correction=0, keepdim=True)
    variances, means = all_gather(torch.stack((variance, mean))[None], axis).unbind(1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square_().mean(0)
    return mean, variance.add_(epsilon).rsqrt_()
