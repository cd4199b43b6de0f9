"""Collectives of 1-D tensor parallelism, with autograd: f and g of Megatron-LM (arXiv 1909.08053).

f (`copy_to_tensor_region`) is the identity in forward and an all-reduce in backward; g
(`reduce_from_tensor_region`) is the opposite. With sequence parallelism (arXiv 2205.05198) they are
an all-gather of tokens, whose backward is a reduce-scatter (`gather_tokens`), and the opposite
(`scatter_tokens`). Dense column-parallel layers do f themselves (`column_parallel`), to overlap its
backward with the GEMMs of the weights' gradients.
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


class _CopyToRegion(torch.autograd.Function):
    """f: each rank's layers use the same input, so that its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.axis), None


class _ReduceFromRegion(torch.autograd.Function):
    """g: the output is the sum of the ranks' partial results, so that each has its full
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherTokens(torch.autograd.Function):
    """f with sequence parallelism: the sum over ranks is needed for this rank's tokens only."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(x_BTD, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient_BTD.contiguous(), ctx.axis), None


class _ScatterTokens(torch.autograd.Function):
    """g with sequence parallelism: every rank's partial result needs the gradient of all tokens."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x_BTD, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient_BTD.contiguous(), ctx.axis), None


class _ShareWeight(torch.autograd.Function):
    """Identity, whose backward sums the gradients of the ranks that hold the same shard.

    One all-reduce over the whole axis of [shards, ...], each rank adding to its own shard, instead
    of a process group for every set of ranks.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, axis: MeshAxis, shard: int, num_shards: int) -> Tensor:
        ctx.axis, ctx.shard, ctx.num_shards = axis, shard, num_shards
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        all_shards = gradient.new_zeros(ctx.num_shards, *gradient.shape)
        if ctx.shard >= ctx.num_shards:  # a rank with padding only: it adds nothing, but takes part
            return all_reduce(all_shards, ctx.axis)[0].zero_(), None, None, None
        all_shards[ctx.shard] = gradient
        return all_reduce(all_shards, ctx.axis)[ctx.shard].clone(), None, None, None


def all_reduce(
    x: Tensor, axis: MeshAxis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """All-reduce a contiguous tensor in place over `axis`."""
    if axis.size > 1:
        run_collective(partial(dist.all_reduce, op=op, group=axis.group), x)
    return x


def all_gather(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """All-gather the ranks' tokens [B, T / ranks, D] to all tokens [B, T, D], in memory order."""
    batch, tokens, *rest = x_BTD.shape
    gathered = x_BTD.new_empty(batch, tokens * axis.size, *rest)
    all_gather_async(gathered, x_BTD, axis)()
    return gathered


def reduce_scatter(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Reduce-scatter contiguous [B, T, D] to the sum of this rank's tokens [B, T / ranks, D].

    `x_BTD` is overwritten.
    """
    batch, tokens, *rest = x_BTD.shape
    local = x_BTD.new_empty(batch, tokens // axis.size, *rest)
    reduce_scatter_async(local, x_BTD, axis)()
    return local


def copy_to_tensor_region(x: Tensor, axis: MeshAxis) -> Tensor:
    """f: enter a tensor-parallel region. Identity; backward all-reduces the gradient."""
    return _CopyToRegion.apply(x, axis) if axis.size > 1 else x


def reduce_from_tensor_region(x: Tensor, axis: MeshAxis) -> Tensor:
    """g: leave a tensor-parallel region. All-reduce of partial results, in place; backward
    identity.
    """
    return _ReduceFromRegion.apply(x, axis) if axis.size > 1 else x


def gather_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a tensor-parallel region from sequence parallelism: all-gather of tokens.

    [B, T / ranks, D] to [B, T, D]; backward reduce-scatters the gradient.
    """
    return _GatherTokens.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def scatter_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a tensor-parallel region into sequence parallelism: reduce-scatter of partial results.

    [B, T, D] to [B, T / ranks, D]; backward all-gathers the gradient.
    """
    return _ScatterTokens.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def share_weight(weight: Tensor, axis: MeshAxis, shard: int, num_shards: int) -> Tensor:
    """A weight shard that several ranks on `axis` hold, such as a GQA key-value head.

    Args:
        shard: Which of `num_shards` different shards this rank's is. Ranks with the same shard sum
            their gradients in backward; one at or beyond `num_shards` is padding, whose gradient
            is zero.
    """
    output: Tensor = _ShareWeight.apply(weight, axis, shard, num_shards)
    return output
