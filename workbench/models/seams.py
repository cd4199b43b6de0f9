"""The five seams of a transformer: the only places that fused kernels and parallel strategies
replace.

Each is a small module with a plain body. A strategy swaps the module, never the code around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
"""Target value that takes no part in the loss."""


class Positions(NamedTuple):
    """Where the tokens of a sequence stand: global indices [T], and the rotary tables [T, head_dim
    / 2].

    `rows` number the tokens of the residual stream for dropout: [B, T], or what of them is here;
    None without it.
    """

    indices: Tensor
    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None


def positions_of(indices: Tensor, rope_dim: int, theta: float, dtype: torch.dtype) -> Positions:
    """Rotary tables for the positions `indices` [T] (Su et al. 2021, arXiv 2104.09864)."""
    exponent = torch.arange(0, rope_dim, 2, device=indices.device, dtype=torch.float64) / rope_dim
    angles = indices.to(torch.float64)[:, None] * (theta**-exponent)[None, :]
    return Positions(indices, angles.cos().to(dtype), angles.sin().to(dtype))


class AddNorm(nn.Module):
    """`add_norm(x, residual)`: add a branch to the residual stream, and normalise the sum."""

    def __init__(self, kind: str, width: int, epsilon: float, bias: bool) -> None:
        super().__init__()
        self.kind, self.epsilon = kind, epsilon
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), both [B, T, D]; without a residual the sum is x itself."""
        total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
        if self.kind == "rmsnorm":
            return _RmsNorm.apply(total, self.weight, self.epsilon), total
        return F.layer_norm(total, total.shape[-1:], self.weight, self.bias, self.epsilon), total


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32 or
    better.

    torch fuses this operator on some devices and composes it on others, which then keep widened
    copies for backward. Here every device keeps the same: the input and one number a token.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        wide = at_least_fp32(x_BTD)
        scale_BT1 = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        return (wide * scale_BT1).to(x_BTD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        incoming = at_least_fp32(gradient_BTD)
        unit = at_least_fp32(x_BTD) * scale_BT1
        weight_gradient = (incoming * unit).flatten(0, -2).sum(0)
        outgoing = incoming * weight_D
        along_BT1 = (outgoing * unit).mean(-1, keepdim=True)
        outgoing.sub_(unit.mul_(along_BT1)).mul_(scale_BT1)
        return outgoing.to(x_BTD.dtype), weight_gradient.to(weight_D.dtype), None


class Rope(nn.Module):
    """`rope(q, k, positions)`: turn query and key heads by their position; halves paired as in
    Llama.
    """

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, head_dim], turned."""
        return _turn(q_BTHK, positions), _turn(k_BTHK, positions)


class NoRope(nn.Module):
    """The same seam for models whose positions are learned at the embedding."""

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, unchanged."""
        return q_BTHK, k_BTHK


def _turn(x_BTHK: Tensor, positions: Positions) -> Tensor:
    first, second = x_BTHK.chunk(2, dim=-1)
    cos, sin = positions.cos[:, None, :], positions.sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attend(nn.Module):
    """`attend(q, k, v, positions)`: causal attention by torch's fused operator."""

    repeats_heads = False
    """Whether key-value heads are repeated first, where the planned GPU's operator takes one a
    query head.
    """

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, positions: Positions
    ) -> Tensor:
        """Attention output [B, T, heads, head_dim]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
        if self.repeats_heads:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""The non-linearity of each kind of feed-forward layer; the gated kinds multiply it by the up
projection.
"""


class Activate(nn.Module):
    """`activate(gate, up)`: the feed-forward non-linearity, gated (SwiGLU, GeGLU) or not (`up` is
    None).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.function = kind, FUNCTIONS[kind]

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor | None) -> Tensor:
        """Activated features [B, T, F]."""
        activated = self.function(gate_BTF)
        return activated if up_BTF is None else activated * up_BTF


class HeadLoss(nn.Module):
    """`head_loss(x, targets)`: the output projection and the summed cross entropy, in fp32 or
    better.
    """

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum over valid tokens of the negative log-likelihood; a scalar."""
        return F.cross_entropy(
            at_least_fp32(F.linear(x_BTD, self.weight).flatten(0, -2)),
            targets_BT.flatten(),
            reduction="sum",
            ignore_index=IGNORE,
        )


def at_least_fp32(x: Tensor) -> Tensor:
    """16-bit tensors widened to fp32; fp32 and fp64 unchanged."""
    return x.float() if x.element_size() < 4 else x
