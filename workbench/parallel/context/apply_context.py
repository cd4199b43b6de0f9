"""Spread a model's sequences over the context axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.models import Transformer
from workbench.models.transformer import Attention
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.token_order import token_indices
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.mesh import MeshAxis


def spread_sequence(model: Transformer, axis: MeshAxis, algorithm: str, length: int) -> None:
    """Replace the attend seams of `model`, in place, and tell it where its tokens stand in
    sequences of `length`.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            spread = RingAttend(axis) if algorithm == "ring" else UlyssesAttend(module.attend, axis)
            setattr(module, "attend", spread)  # noqa: B010 (a seam takes any module of its signature)
    model.indices = _indices(axis, algorithm, length)


def _indices(axis: MeshAxis, algorithm: str, length: int) -> Callable[[Tensor], Tensor]:
    def indices(x: Tensor) -> Tensor:
        return token_indices(length, axis, algorithm, x.device)

    return indices


def own_tokens(
    tokens: Tensor, targets: Tensor, axis: MeshAxis, algorithm: str
) -> tuple[Tensor, Tensor]:
    """What this rank takes of tokens and targets [..., T]: [..., T / ranks] of each."""
    if axis.size == 1:
        return tokens, targets
    indices = token_indices(tokens.shape[-1], axis, algorithm, torch.device(tokens.device))
    return tokens.index_select(-1, indices), targets.index_select(-1, indices)
