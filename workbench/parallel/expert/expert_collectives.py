"""The collectives of expert parallelism: rows to their experts' ranks, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import run_collective
from workbench.parallel.mesh import MeshAxis


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, sent: list[int], received: list[int], axis: MeshAxis
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _exchange(x_RD, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient.contiguous(), ctx.received, ctx.sent, ctx.axis), None, None, None


def _exchange(x_RD: Tensor, sent: list[int], received: list[int], axis: MeshAxis) -> Tensor:
    result = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    exchanged = partial(
        dist.all_to_all_single,
        output_split_sizes=received,
        input_split_sizes=sent,
        group=axis.group,
    )
    run_collective(exchanged, result, x_RD)
    return result


def all_to_all(
    x_RD: Tensor, sent: Sequence[int], received: Sequence[int], axis: MeshAxis
) -> Tensor:
    """Rows to the ranks of `axis`: the first `sent[0]` to index 0 and so on; `received[i]` rows
    come from index i.

    Backward sends the gradients the other way.
    """
    result: Tensor = _AllToAll.apply(x_RD, list(sent), list(received), axis)
    return result


def summed(counts_BE: Tensor, axis: MeshAxis) -> Tensor:
    """What the ranks of `axis`, which share sequences, count of them together; in place."""
    run_collective(partial(dist.all_reduce, group=axis.group), counts_BE)
    return counts_BE


def exchange_counts(counts_E: Tensor, axis: MeshAxis) -> Tensor:
    """Rows that this rank has for each expert, to the rows that it gets: [source rank, own
    expert].
    """
    received = torch.empty_like(counts_E)
    run_collective(partial(dist.all_to_all_single, group=axis.group), received, counts_E)
    return received.view(axis.size, -1)
