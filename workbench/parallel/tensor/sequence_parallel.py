"""Sequence parallelism: what lies between split regions holds a run of the tokens each
(2205.05198).

Tokens are cut in the order in which they lie in memory, [B, T] row by row into equal runs, so that
gathering and scattering move no entry within a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions
from workbench.parallel.mesh import MeshAxis


def keep_own_positions(
    axis: MeshAxis, module: nn.Module, inputs: tuple[Tensor, Positions]
) -> tuple[Tensor, Positions]:
    """Before an embedding's forward: learned positions are looked up for this rank's run of tokens
    alone.
    """
    tokens_BT, positions = inputs
    return tokens_BT, positions._replace(
        indices=own_run(axis, positions.indices.expand(tokens_BT.shape))
    )


def own_run(axis: MeshAxis, x_BT: Tensor) -> Tensor:
    """Of something that each token has, [B, T], what belongs to this rank's run of tokens, [B, T /
    ranks].
    """
    batch, length = x_BT.shape
    return x_BT.flatten().chunk(axis.size)[axis.index].view(batch, length // axis.size)


def whole_indices(length: int) -> Callable[[Tensor], Tensor]:
    """Where the tokens that attention meets stand: whole sequences of `length`, however few tokens
    a stage is given.
    """

    def indices(x: Tensor) -> Tensor:
        return torch.arange(length, device=x.device)

    return indices
