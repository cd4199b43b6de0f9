"""Apply context parallelism to a model: replace its attention, and shard its sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.models.block import AnyAttention
from workbench.parallel.async_collectives import run_collective
from workbench.parallel.context.blockwise_ring import zigzag_indices
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.mesh import MeshAxis


def apply_context_parallel(
    model: Transformer, ring: MeshAxis, ulysses: MeshAxis, length: int
) -> None:
    """Replace the attend seams of `model`, in place, and set the indices of its tokens.

    With both axes longer than 1 Ulysses' all-to-alls surround ring attention: within a group of
    `ulysses` ranks heads are exchanged for the group's tokens, of which the ring's ranks then hold
    a shard each (USP, Fang and Zhao 2024, arXiv 2405.07719).

    Args:
        model: A stage, on the meta device.
        ring: The axis around which keys and values are sent.
        ulysses: The axis of the all-to-alls.
        length: Tokens of a whole sequence.
    """
    for module in model.modules():
        if isinstance(module, AnyAttention):
            attend: nn.Module = module.attend
            if ring.size > 1:
                attend = RingAttend(ring, module.attend.kernel, module.attend.rule)
            if ulysses.size > 1:
                attend = UlyssesAttend(attend, ulysses)
            setattr(module, "attend", attend)  # noqa: B010 (a seam takes any module of its signature)
    model.indices, model.length = partial(_indices_like, ring, ulysses, length), length


def _indices_like(ring: MeshAxis, ulysses: MeshAxis, length: int, x: Tensor) -> Tensor:
    return token_indices(length, ring, ulysses, x.device)


def token_indices(length: int, ring: MeshAxis, ulysses: MeshAxis, device: torch.device) -> Tensor:
    """Indices [length / ranks] in the sequence of this rank's tokens, ascending.

    Ring attention needs the zigzag order: of 2 x ranks chunks rank i takes the i-th and the i-th
    from the end, so that under a causal mask all ranks have the same work. Ulysses takes contiguous
    shards of that: within attention all its ranks have the same tokens.
    """
    if ring.size == 1:
        indices = torch.arange(length, device=device)
    else:
        indices = zigzag_indices(length, ring, device)
    return indices.chunk(ulysses.size)[ulysses.index]


class _SumOfSequenceParts(torch.autograd.Function):
    """All-reduce of what each rank has of sequences. What follows from the sum is the same on every
    rank, and each is one of `axis.size` parts of it: a rank's gradient is the sum of theirs.
    """

    @staticmethod
    def forward(ctx: Any, parts_B: Tensor, axis: MeshAxis) -> Tensor:
        ctx.size = axis.size
        summed = parts_B.clone()
        run_collective(partial(dist.all_reduce, group=axis.group), summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor, None]:
        return gradient_B * ctx.size, None


def sum_sequence_parts(parts_B: Tensor, axis: MeshAxis) -> Tensor:
    """Sum over the context axis of a figure of each sequence [B]."""
    summed: Tensor = _SumOfSequenceParts.apply(parts_B, axis) if axis.size > 1 else parts_B
    return summed


def local_tokens(
    tokens: Tensor, targets: Tensor, ring: MeshAxis, ulysses: MeshAxis
) -> tuple[Tensor, Tensor]:
    """This rank's part [..., T / ranks] of tokens and of targets [..., T]."""
    if ring.size == ulysses.size == 1:
        return tokens, targets
    indices = token_indices(tokens.shape[-1], ring, ulysses, torch.device(tokens.device))
    return tokens.index_select(-1, indices), targets.index_select(-1, indices)
