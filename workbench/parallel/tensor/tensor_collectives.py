"""The collectives of 1-D tensor parallelism: pairs that are each other's backward (f and g in
1909.08053; gathers and scatters of tokens in 2205.05198), and the sum of a shared weight's
gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import (
    all_gather_async,
    reduce_scatter_async,
    run_collective,
)
from workbench.parallel.mesh import MeshAxis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(x_BTD, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient_BTD.contiguous(), ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x_BTD, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient_BTD.contiguous(), ctx.axis), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, axis: MeshAxis, piece: int, pieces: int) -> Tensor:
        ctx.axis, ctx.piece, ctx.pieces = axis, piece, pieces
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradient.new_zeros(ctx.pieces, *gradient.shape)
        if ctx.piece >= ctx.pieces:  # a rank that holds none of them adds nothing
            return all_reduce(whole, ctx.axis)[0].zero_(), None, None, None
        whole[ctx.piece] = gradient
        return all_reduce(whole, ctx.axis)[ctx.piece].clone(), None, None, None


def all_reduce(
    x: Tensor, axis: MeshAxis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce a contiguous tensor in place over `axis`."""
    if axis.size > 1:
        run_collective(partial(dist.all_reduce, op=op, group=axis.group), x)
    return x


def all_gather(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """The ranks' tokens [B, T / ranks, D] side by side, [B, T, D]: all tokens in order, cut into
    equal runs.
    """
    batch, tokens, *rest = x_BTD.shape
    whole = x_BTD.new_empty(batch, tokens * axis.size, *rest)
    all_gather_async(whole, x_BTD, axis)()
    return whole


def reduce_scatter(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of the ranks' contiguous [B, T, D], which is spent; each keeps its run of tokens, [B,
    T / ranks, D].
    """
    batch, tokens, *rest = x_BTD.shape
    part = x_BTD.new_empty(batch, tokens // axis.size, *rest)
    reduce_scatter_async(part, x_BTD, axis)()
    return part


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a split region: identity forward, sum of the ranks' gradients backward."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a split region: sum of the ranks' partial results (in place), identity backward."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a split region from split tokens: [B, T / ranks, D] to [B, T, D]; backward sums and
    scatters.
    """
    return _Gather.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def scatter_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a split region: the sum of partial [B, T, D], of which a rank keeps its run of tokens;
    backward gathers.
    """
    return _Scatter.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def share(weight: Tensor, axis: MeshAxis, piece: int, pieces: int) -> Tensor:
    """A weight that several ranks on `axis` hold in common: this one's is `piece` of `pieces`
    different ones.

    The gradients of those that hold the same are summed; a `piece` beyond the last is nobody's and
    stays as it is.
    """
    return _Share.apply(weight, axis, piece, pieces)
