"""Collectives of tensor grids: broadcast and reduce of blocks along rows and columns (SUMMA).

Those along two axes are issued together, so that a rank waits once for both.
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


class PendingMove(NamedTuple):
    """A collective along `axis` that is yet to be issued, and the block it reads or writes."""

    collective: Callable[..., Any]
    block: Tensor
    axis: MeshAxis


def broadcast(x: Tensor, axis: MeshAxis, root: int) -> PendingMove:
    """Broadcast of the block of index `root`: `x` itself there, elsewhere a new tensor of its
    size.
    """
    block = x if axis.index == root else torch.empty_like(x)
    return PendingMove(partial(dist.broadcast, group=axis.group, group_src=root), block, axis)


def reduce(x: Tensor, axis: MeshAxis, root: int) -> PendingMove:
    """Reduce of the ranks' `x` to index `root`, in place; elsewhere `x` is overwritten."""
    return PendingMove(partial(dist.reduce, group=axis.group, group_dst=root), x, axis)


def run_moves(*moves: PendingMove) -> list[Tensor]:
    """Issue moves together, wait for all, and return their blocks; in the same order on all
    ranks.
    """
    issued = [move for move in moves if move.axis.size > 1]
    for wait in [start_collective(move.collective, move.block) for move in issued]:
        wait()
    return [move.block for move in moves]


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """All-reduce in place: the sum of the ranks' `x`."""
    if axis.size > 1:
        run_collective(partial(dist.all_reduce, group=axis.group), x)
    return x


def all_gather(x: Tensor, axis: MeshAxis) -> Tensor:
    """All-gather of the ranks' blocks [n, ...] to [n * ranks, ...]."""
    if axis.size == 1:
        return x
    gathered = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    all_gather_async(gathered, x, axis)()
    return gathered


def reduce_scatter(x: Tensor, axis: MeshAxis) -> Tensor:
    """Reduce-scatter of contiguous [n * ranks, ...], which is overwritten, to this rank's [n,
    ...].
    """
    if axis.size == 1:
        return x
    block = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    reduce_scatter_async(block, x, axis)()
    return block


def swap_with_peer(x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
    """Send `x` to index `peer` of `axis` and receive its block; a rank that is its own peer keeps
    x.
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


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
        ctx.axis, ctx.peer = axis, peer
        return swap_with_peer(x, axis, peer).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return swap_with_peer(gradient.contiguous(), ctx.axis, ctx.peer), None, None


def swap_with_gradient(x: Tensor, axis: MeshAxis, peer: int) -> Tensor:
    """`swap_with_peer`, whose backward swaps the gradients back."""
    y: Tensor = _Swap.apply(x, axis, peer)
    return y
