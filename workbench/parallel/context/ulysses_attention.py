"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): all-to-all between tokens and heads.

Outside attention a rank has some tokens of all heads; within it, all tokens of some heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions
from workbench.parallel.context.context_collectives import all_to_all_equal
from workbench.parallel.mesh import MeshAxis


class UlyssesAttend(nn.Module):
    """The attend seam between two all-to-alls; `attend` is the single-device one."""

    def __init__(self, attend: nn.Module, axis: MeshAxis) -> None:
        super().__init__()
        self.attend, self.axis = attend, axis

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
    ) -> Tensor:
        """Causal attention of this rank's tokens to the whole sequence.

        Args:
            q_BTHK: [B, T / ranks, heads, head_dim]; heads are divisible by ranks.
            k_BTGK: [B, T / ranks, key-value heads, head_dim]. GQA: where the ranks do not divide
                the heads, they are repeated first, as few times as needed.
            v_BTGK: The same shape.

        Returns:
            [B, T / ranks, heads, head_dim].
        """
        ranks = self.axis.size
        groups = k_BTGK.shape[2]
        if groups % ranks:
            repeats = ranks // math.gcd(groups, ranks)
            k_BTGK, v_BTGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BTGK, v_BTGK))
        num_heads = [x.shape[2] // ranks for x in (q_BTHK, k_BTGK, v_BTGK)]
        # One all-to-all for all three: each rank's heads of q, k and v are concatenated.
        parts = [x.unflatten(2, (ranks, -1)) for x in (q_BTHK, k_BTGK, v_BTGK)]
        q, k, v = _TokensToHeads.apply(torch.cat(parts, dim=3), self.axis).split(num_heads, dim=2)
        output: Tensor = _HeadsToTokens.apply(self.attend(q, k, v, positions), self.axis)
        return output


class _TokensToHeads(torch.autograd.Function):
    """[B, T / ranks, ranks, heads, K] to this rank's heads of all tokens, [B, T, heads, K].

    An all-to-all only moves entries, so that its backward is the inverse all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, x_BTRHK: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _gather_tokens(x_BTRHK, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BSHK: Tensor) -> tuple[Tensor, None]:
        return _gather_heads(gradient_BSHK, ctx.axis), None


class _HeadsToTokens(torch.autograd.Function):
    """The inverse: [B, T, heads, K] to all heads of this rank's tokens, [B, T / ranks, H, K]."""

    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _gather_heads(x_BSHK, axis).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor, None]:
        return _gather_tokens(gradient_BTHK.unflatten(2, (ctx.axis.size, -1)), ctx.axis), None


def _gather_tokens(x_BTRHK: Tensor, axis: MeshAxis) -> Tensor:
    received_RBTHK = all_to_all_equal(x_BTRHK.movedim(2, 0).contiguous(), axis)
    return received_RBTHK.movedim(0, 1).flatten(1, 2)


def _gather_heads(x_BSHK: Tensor, axis: MeshAxis) -> Tensor:
    sent_RBTHK = x_BSHK.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
    return all_to_all_equal(sent_RBTHK, axis).movedim(0, 2)
