"""Sequence parallelism (arXiv 2205.05198): outside tensor-parallel regions ranks have some tokens
each.

Tokens are sharded in memory order, [B, T] in row-major order in equal runs, so that all-gather and
reduce-scatter need no copy within a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions
from workbench.parallel.mesh import MeshAxis


def shard_positions(
    axis: MeshAxis, module: nn.Module, inputs: tuple[Tensor, Positions]
) -> tuple[Tensor, Positions]:
    """Pre-hook of an embedding: learned positions are looked up for this rank's tokens only."""
    tokens_BT, positions = inputs
    return tokens_BT, positions._replace(
        indices=local_run(axis, positions.indices.expand(tokens_BT.shape))
    )


def local_run(axis: MeshAxis, x_BT: Tensor) -> Tensor:
    """This rank's run of tokens [B, T / ranks], out of something that each token has, [B, T]."""
    batch, length = x_BT.shape
    return x_BT.flatten().chunk(axis.size)[axis.index].view(batch, length // axis.size)


def full_sequence_indices(length: int) -> Callable[[Tensor], Tensor]:
    """The positions that attention sees, for any input: all `length` of the sequence.

    The input of a stage has this rank's tokens only, and its shape does not give them.
    """

    def indices(x: Tensor) -> Tensor:
        return torch.arange(length, device=x.device)

    return indices
