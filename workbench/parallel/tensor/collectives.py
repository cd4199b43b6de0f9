"""The collectives of 1-D tensor parallelism: two that are each other's backward (f and g in 1909.08053), and the sum
of a shared weight's gradient."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

LET_GO_SECONDS = 0.1
LOOK_SECONDS = 50e-6
"""Long enough for gloo's thread to get the core that it needs."""


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


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, axis: MeshAxis, pieces: int) -> Tensor:
        ctx.axis, ctx.pieces = axis, pieces
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        piece = ctx.axis.index // (ctx.axis.size // ctx.pieces)
        whole = gradient.new_zeros(ctx.pieces, *gradient.shape)
        whole[piece] = gradient
        return all_reduce(whole, ctx.axis)[piece].clone(), None, None


def all_reduce(x: Tensor, axis: MeshAxis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a contiguous tensor in place over `axis`."""
    if axis.size > 1:
        alias = x.detach()
        dist.all_reduce(alias, op, group=axis.group)
        if x.device.type == "cpu":
            held = weakref.ref(alias)
            del alias
            _let_go(held)
    return x


def _let_go(held: weakref.ref[Tensor]) -> None:
    """Wait until gloo's thread has dropped the tensor, a moment after the result is there.

    Else that thread may be the last to hold it, and memory lives longer than the step needs, by the scheduler's whim.
    """
    deadline = time.monotonic() + LET_GO_SECONDS
    while held() is not None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a split region: identity forward, sum of the ranks' gradients backward."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a split region: sum of the ranks' partial results (in place), identity backward."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def share(weight: Tensor, axis: MeshAxis, pieces: int) -> Tensor:
    """A weight that neighbours on `axis` hold in common (`pieces` different ones): their gradients are summed."""
    return _Share.apply(weight, axis, pieces)
