"""The collectives of 1-D tensor parallelism: pairs that are each other's backward (f and g in 1909.08053; gathers and
scatters of tokens in 2205.05198), and the sum of a shared weight's gradient."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

SCATTER: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
GATHER: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed both."""
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


def all_reduce(x: Tensor, axis: MeshAxis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a contiguous tensor in place over `axis`."""
    if axis.size > 1:
        call(partial(dist.all_reduce, op=op, group=axis.group), x)
    return x


def all_gather(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """The ranks' tokens [B, T / ranks, D] side by side, [B, T, D]: all tokens in order, cut into equal runs."""
    batch, tokens, *rest = x_BTD.shape
    whole = x_BTD.new_empty(batch, tokens * axis.size, *rest)
    call(partial(GATHER, group=axis.group), whole.flatten(0, 1), x_BTD.flatten(0, 1))
    return whole


def reduce_scatter(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """The sum of the ranks' contiguous [B, T, D], of which each keeps its run of tokens, [B, T / ranks, D]."""
    batch, tokens, *rest = x_BTD.shape
    part = x_BTD.new_empty(batch, tokens // axis.size, *rest)
    call(partial(SCATTER, group=axis.group), part.flatten(0, 1), x_BTD.flatten(0, 1))
    return part


def call(collective: Callable[..., object], *tensors: Tensor) -> None:
    """Run a collective on aliases of `tensors` and wait for it."""
    begin(collective, *tensors)()


def begin(collective: Callable[..., Any], *tensors: Tensor) -> Callable[[], None]:
    """Begin a collective on aliases of `tensors`; to be called once, what is returned waits for it.

    On the CPU nothing else holds the tensors then.
    """
    aliases = [x.detach() for x in tensors]
    works = [collective(*aliases, async_op=True)]
    held = [weakref.ref(alias) for alias in aliases] if aliases[0].device.type == "cpu" else []
    del aliases

    def finish() -> None:
        works.pop().wait()
        _let_go(held)

    return finish


def _let_go(held: list[weakref.ref[Tensor]]) -> None:
    """Wait until gloo's thread has dropped the tensors, a moment after the result is there.

    Else that thread may be the last to hold them, and memory lives longer than the step needs, by the scheduler's whim.
    """
    deadline = time.monotonic() + LET_GO_SECONDS
    while any(one() is not None for one in held) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a split region: identity forward, sum of the ranks' gradients backward."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a split region: sum of the ranks' partial results (in place), identity backward."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a split region from split tokens: [B, T / ranks, D] to [B, T, D]; backward sums and scatters."""
    return _Gather.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def scatter_tokens(x_BTD: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a split region: the sum of partial [B, T, D], of which a rank keeps its run of tokens; backward gathers."""
    return _Scatter.apply(x_BTD, axis) if axis.size > 1 else x_BTD


def share(weight: Tensor, axis: MeshAxis, piece: int, pieces: int) -> Tensor:
    """A weight that several ranks on `axis` hold in common: this one's is `piece` of `pieces` different ones.

    The gradients of those that hold the same are summed; a `piece` beyond the last is nobody's and stays as it is.
    """
    return _Share.apply(weight, axis, piece, pieces)
