"""All-to-all over heads (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509): each rank sees
all tokens of some heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.seams import Positions
from workbench.parallel.context.context_collectives import exchange
from workbench.parallel.mesh import MeshAxis


class UlyssesAttend(nn.Module):
    """The attend seam between two exchanges; `attend` is the plain one."""

    def __init__(self, attend: nn.Module, axis: MeshAxis) -> None:
        super().__init__()
        self.attend, self.axis = attend, axis

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
    ) -> Tensor:
        """Attention output [B, T / ranks, heads, head_dim]. Key-value heads fewer than ranks are
        repeated first.
        """
        ranks = self.axis.size
        groups = k_BTGK.shape[2]
        if groups % ranks:
            times = ranks // math.gcd(groups, ranks)
            k_BTGK, v_BTGK = (x.repeat_interleave(times, dim=2) for x in (k_BTGK, v_BTGK))
        counts = [x.shape[2] // ranks for x in (q_BTHK, k_BTGK, v_BTGK)]
        # One exchange for all three: each rank's heads of q, k and v side by side.
        parts = [x.unflatten(2, (ranks, -1)) for x in (q_BTHK, k_BTGK, v_BTGK)]
        q, k, v = _Gather.apply(torch.cat(parts, dim=3), self.axis).split(counts, dim=2)
        return _Scatter.apply(self.attend(q, k, v, positions), self.axis)


class _Gather(torch.autograd.Function):
    """[B, T / ranks, ranks, heads, K] to [B, T, heads, K]: this rank's heads of all tokens."""

    @staticmethod
    def forward(ctx: Any, x_BTRHK: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _to_tokens(x_BTRHK, axis)

    @staticmethod
    def backward(ctx: Any, gradient_BSHK: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient_BSHK, ctx.axis), None


class _Scatter(torch.autograd.Function):
    """[B, T, heads, K] to [B, T / ranks, ranks x heads, K]: the inverse."""

    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _to_heads(x_BSHK, axis).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(gradient_BTHK.unflatten(2, (ctx.axis.size, -1)), ctx.axis), None


def _to_tokens(x_BTRHK: Tensor, axis: MeshAxis) -> Tensor:
    received_RBTHK = exchange(x_BTRHK.movedim(2, 0).contiguous(), axis)
    return received_RBTHK.movedim(0, 1).flatten(1, 2)


def _to_heads(x_BSHK: Tensor, axis: MeshAxis) -> Tensor:
    sent_RBTHK = x_BSHK.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
    return exchange(sent_RBTHK, axis).movedim(0, 2)
