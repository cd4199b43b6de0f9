"""The collectives of tensor grids: blocks go round along one side, partial results come back along
another.

What moves along two sides at a time moves side by side: a rank waits once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import (
    all_gather_async,
    reduce_scatter_async,
    run_collective,
    start_collective,
)
from workbench.parallel.mesh import MeshAxis


class Move(NamedTuple):
    """A collective along `axis` that is yet to run, and the block that it reads or writes."""

    collective: Callable[..., Any]
    block: Tensor
    axis: MeshAxis


def broadcast(x: Tensor, axis: MeshAxis, root: int) -> Move:
    """To the block that index `root` of `axis` holds: there `x` itself, elsewhere a new tensor of
    its size.
    """
    block = x if axis.index == root else torch.empty_like(x)
    return Move(partial(dist.broadcast, group=axis.group, group_src=root), block, axis)


def reduce(x: Tensor, axis: MeshAxis, root: int) -> Move:
    """To the sum of the ranks' `x` at index `root` of `axis`; elsewhere `x` is used up."""
    return Move(partial(dist.reduce, group=axis.group, group_dst=root), x, axis)


def together(*moves: Move) -> list[Tensor]:
    """Run moves side by side, and give their blocks once all are done; all ranks name them in the
    same order.
    """
    moving = [move for move in moves if move.axis.size > 1]
    for finish in [start_collective(move.collective, move.block) for move in moving]:
        finish()
    return [move.block for move in moves]


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of the ranks' `x`, in place."""
    if axis.size > 1:
        run_collective(partial(dist.all_reduce, group=axis.group), x)
    return x


def all_gather(x: Tensor, axis: MeshAxis) -> Tensor:
    """The ranks' blocks [n, ...] one after the other, [n * ranks, ...]."""
    if axis.size == 1:
        return x
    whole = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    all_gather_async(whole, x, axis)()
    return whole


def reduce_scatter(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of the ranks' contiguous [n * ranks, ...], which is spent; each keeps its block [n,
    ...].
    """
    if axis.size == 1:
        return x
    block = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    reduce_scatter_async(block, x, axis)()
    return block


def exchange(x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
    """What index `peer` of `axis` holds in the place of `x`; it gets `x`. Nothing moves where that
    is this rank.
    """
    if peer == axis.index:
        return x
    theirs = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return theirs


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
        ctx.axis, ctx.peer = axis, peer
        return exchange(x, axis, peer).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchange(gradient.contiguous(), ctx.axis, ctx.peer), None, None


def exchanged(x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
    """`exchange`, whose backward brings the gradient home."""
    y: Tensor = _Exchanged.apply(x, axis, peer)
    return y
