"""Apply context parallelism to a model: replace its attention, and shard its sequences."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from workbench.models import Transformer
from workbench.models.transformer import Attention
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.mesh import MeshAxis


def apply_context_parallel(model: Transformer, axis: MeshAxis, algorithm: str, length: int) -> None:
    """Replace the attend seams of `model`, in place, and set the indices of its tokens.

    Args:
        model: A stage, on the meta device.
        axis: The context axis.
        algorithm: "ring" or "ulysses".
        length: Tokens of a whole sequence.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            ring = algorithm == "ring"
            attend = RingAttend(axis) if ring else UlyssesAttend(module.attend, axis)
            setattr(module, "attend", attend)  # noqa: B010 (a seam takes any module of its signature)
    model.indices = partial(_indices_like, axis, algorithm, length)


def _indices_like(axis: MeshAxis, algorithm: str, length: int, x: Tensor) -> Tensor:
    return token_indices(length, axis, algorithm, x.device)


def token_indices(length: int, axis: MeshAxis, algorithm: str, device: torch.device) -> Tensor:
    """Indices [length / ranks] in the sequence of this rank's tokens, ascending.

    Ring attention needs the zigzag order: of 2 x ranks chunks rank i takes the i-th and the i-th
    from the end, so that under a causal mask all ranks have the same work. Ulysses takes contiguous
    shards: within attention every rank has all tokens.
    """
    if algorithm == "ulysses":
        num_local = length // axis.size
        return torch.arange(axis.index * num_local, (axis.index + 1) * num_local, device=device)
    chunk = length // (2 * axis.size)
    first, second = (
        torch.arange(i * chunk, (i + 1) * chunk, device=device)
        for i in (axis.index, 2 * axis.size - 1 - axis.index)
    )
    return torch.cat((first, second))


def local_tokens(
    tokens: Tensor, targets: Tensor, axis: MeshAxis, algorithm: str
) -> tuple[Tensor, Tensor]:
    """This rank's part [..., T / ranks] of tokens and of targets [..., T]."""
    if axis.size == 1:
        return tokens, targets
    indices = token_indices(tokens.shape[-1], axis, algorithm, torch.device(tokens.device))
    return tokens.index_select(-1, indices), targets.index_select(-1, indices)
