"""Spread a model's sequences over the context axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.models import Transformer
from workbench.models.transformer import Attention
from workbench.parallel.context.order import token_indices
from workbench.parallel.context.ring import RingAttend
from workbench.parallel.context.ulysses import UlyssesAttend
from workbench.parallel.mesh import MeshAxis


def spread_sequence(model: Transformer, axis: MeshAxis, algorithm: str, length: int) -> None:
    """Replace the attend seams of `model`, in place, and tell it where its tokens stand in sequences of `length`."""
    for module in model.modules():
        if isinstance(module, Attention):
            spread = RingAttend(axis) if algorithm == "ring" else UlyssesAttend(module.attend, axis)
            setattr(module, "attend", spread)  # noqa: B010 (a seam takes any module of its signature)
    model.indices = _indices(axis, algorithm, length)


def _indices(axis: MeshAxis, algorithm: str, length: int) -> Callable[[Tensor], Tensor]:
    def indices(x: Tensor) -> Tensor:
        return token_indices(length, axis, algorithm, x.device)

    return indices


def own_tokens(x: Tensor, axis: MeshAxis, algorithm: str) -> Tensor:
    """What this rank takes of tokens or targets [..., T]: [..., T / ranks]."""
    if axis.size == 1:
        return x
    return x.index_select(-1, token_indices(x.shape[-1], axis, algorithm, torch.device(x.device)))
