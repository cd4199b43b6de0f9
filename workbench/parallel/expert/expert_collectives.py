"""Collectives of expert parallelism: all-to-all of MoE dispatch and combine, and of token
counts.
"""

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
    """Backward is the all-to-all with send and receive counts exchanged."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, sent: list[int], received: list[int], axis: MeshAxis
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _all_to_all(x_RD, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            _all_to_all(gradient.contiguous(), ctx.received, ctx.sent, ctx.axis),
            None,
            None,
            None,
        )


def _all_to_all(x_RD: Tensor, sent: list[int], received: list[int], axis: MeshAxis) -> Tensor:
    result = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    collective = partial(
        dist.all_to_all_single,
        output_split_sizes=received,
        input_split_sizes=sent,
        group=axis.group,
    )
    run_collective(collective, result, x_RD)
    return result


def all_to_all(
    x_RD: Tensor, sent: Sequence[int], received: Sequence[int], axis: MeshAxis
) -> Tensor:
    """All-to-all of rows with uneven counts; its backward sends the gradients back.

    Args:
        x_RD: Rows [R, D], sorted by destination rank.
        sent: Number of rows for each index of `axis`.
        received: Number of rows from each index of `axis`.

    Returns:
        Rows [sum(received), D], sorted by source rank.
    """
    result: Tensor = _AllToAll.apply(x_RD, list(sent), list(received), axis)
    return result


def all_reduce_counts(counts_BE: Tensor, axis: MeshAxis) -> Tensor:
    """Sum, in place, what the ranks of `axis` count of the sequences that they share."""
    run_collective(partial(dist.all_reduce, group=axis.group), counts_BE)
    return counts_BE


def exchange_counts(counts_E: Tensor, axis: MeshAxis) -> Tensor:
    """Rows that this rank sends to each expert [E], to those it receives: [source rank, local
    expert].
    """
    received = torch.empty_like(counts_E)
    run_collective(partial(dist.all_to_all_single, group=axis.group), received, counts_E)
    return received.view(axis.size, -1)
