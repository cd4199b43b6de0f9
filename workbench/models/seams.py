"""The five seams of a transformer: what fused kernels and parallel strategies may replace.

`add_norm`, `rope`, `attend`, `activate` and `head_loss` are small modules with a plain body. A
strategy swaps the module, never the code around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.attention.attention_kernels import attention, repeat_heads
from workbench.models.attention.blockwise_attention import blockwise_attention, math_attention
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.attention.soft_cap import soft_cap

IGNORE_INDEX = -100
"""Target that the loss ignores, as in `F.cross_entropy`."""


class Positions(NamedTuple):
    """Positions of a stage's tokens.

    Attributes:
        indices: Positions in the sequence [T], or in each token's document [B, T].
        cos: Rotary table [T, rotated entries of a head / 2].
        sin: The same of sines.
        rows: Ids of the tokens in this rank's residual stream for dropout, [B, T]; None without.
        document_starts: Index of the first token of each token's document [B, S], where attention
            ends at documents; of unsharded sequences.
        window: Tables of cosines and sines of layers with a window, where these have others.
        region_rows: As `rows`, of all tokens that tensor-parallel regions have.
    """

    indices: Tensor
    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None
    document_starts: Tensor | None = None
    window: tuple[Tensor, Tensor] | None = None
    region_rows: Tensor | None = None


def rotary_positions(indices: Tensor, rope_dim: int, theta: float, dtype: torch.dtype) -> Positions:
    """Rotary tables for the positions `indices` [T] (Su et al. 2021, arXiv 2104.09864)."""
    frequencies_K = theta ** -rotary_exponent(rope_dim, indices.device)
    return rotary_tables(indices, frequencies_K, dtype)


def rotary_exponent(rope_dim: int, device: torch.device) -> Tensor:
    """Share of the head before each pair [rope_dim / 2], in fp64."""
    return torch.arange(0, rope_dim, 2, device=device, dtype=torch.float64) / rope_dim


def rotary_tables(
    indices: Tensor, frequencies_K: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> Positions:
    """Tables of the cosine and sine of positions `indices` [T] at `frequencies_K` [rope_dim / 2],
    in radians a token, times `factor`.
    """
    angles = indices.to(torch.float64)[:, None] * frequencies_K[None, :]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return Positions(indices, cos.to(dtype), sin.to(dtype))


class AddNorm(nn.Module):
    """`add_norm(x, residual)`: RMSNorm or LayerNorm of branch plus residual stream.

    Args:
        kind: rmsnorm or layernorm.
        width: Entries that are normalised together.
        epsilon: Added to the variance.
        bias: Whether it has one.
        zero_centered: Whether RMSNorm multiplies by 1 + weight, as Gemma's.
    """

    def __init__(
        self, kind: str, width: int, epsilon: float, bias: bool, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.epsilon, self.zero_centered = kind, epsilon, zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), both [B, T, D]; without a residual the sum is x itself."""
        total = x_BTD if residual_BTD is None else x_BTD + residual_BTD
        if self.kind == "rmsnorm":
            return _RmsNorm.apply(total, self.weight, self.epsilon, self.zero_centered), total
        return F.layer_norm(total, total.shape[-1:], self.weight, self.bias, self.epsilon), total


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32 or
    better.

    torch fuses this operator on some devices and composes it on others, which then save upcast
    copies for backward. Here every device saves the same: the input and one scalar a token.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_D: Tensor, epsilon: float, zero_centered: bool
    ) -> Tensor:
        upcast = at_least_fp32(x_BTD)
        scale_BT1 = upcast.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        ctx.zero_centered = zero_centered
        if zero_centered:  # rounded once: 1 + weight has more digits than a 16-bit weight
            return (upcast * scale_BT1).mul_(1 + at_least_fp32(weight_D)).to(x_BTD.dtype)
        return (upcast * scale_BT1).to(x_BTD.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        gradient = at_least_fp32(gradient_BTD)
        unit = at_least_fp32(x_BTD) * scale_BT1
        weight_gradient: Tensor | None = None
        if ctx.needs_input_grad[1]:  # not of a frozen weight
            weight_gradient = (gradient * unit).flatten(0, -2).sum(0).to(weight_D.dtype)
        factor = 1 + at_least_fp32(weight_D) if ctx.zero_centered else weight_D
        x_gradient = gradient * factor
        projection_BT1 = (x_gradient * unit).mean(-1, keepdim=True)
        x_gradient.sub_(unit.mul_(projection_BT1)).mul_(scale_BT1)
        return x_gradient.to(x_BTD.dtype), weight_gradient, None, None


class Rope(nn.Module):
    """`rope(q, k, positions)`: rotary position embedding (RoPE, 2104.09864); halves paired as
    Llama.
    """

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, head_dim], rotated."""
        return _rotate(q_BTHK, positions), _rotate(k_BTHK, positions)


class PartialRope(nn.Module):
    """The rope seam of models that rotate the leading entries of a head (GPT-NeoX's `rotary_pct`)
    and leave the others as they are.
    """

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, head_dim]."""
        return _rotate_leading(q_BTHK, positions), _rotate_leading(k_BTHK, positions)


class NoRope(nn.Module):
    """The rope seam of models with learned positions: identity."""

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, unchanged."""
        return q_BTHK, k_BTHK


def _rotate(x_BTHK: Tensor, positions: Positions, *others: Tensor) -> Tensor:
    """Rotated entries of a head, and `others` behind them."""
    first, second = x_BTHK.chunk(2, dim=-1)
    cos, sin = positions.cos[:, None, :], positions.sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *others), dim=-1)


def _rotate_leading(x_BTHK: Tensor, positions: Positions) -> Tensor:
    rotated = 2 * positions.cos.shape[-1]
    first, others = x_BTHK.split((rotated, x_BTHK.shape[-1] - rotated), dim=-1)
    return _rotate(first, positions, others)


CAUSAL = ScoreRule()


class Attend(nn.Module):
    """`attend(q, k, v, positions)`: causal attention (MHA or GQA).

    Args:
        rule: What is done to scores, for the query heads of this rank.
    """

    kernel = "flash"
    """The plan's `strategy.attention`. Efficient and math need key-value heads repeated, one for
    each query head.
    """

    def __init__(self, rule: ScoreRule = CAUSAL) -> None:
        super().__init__()
        self.rule = rule

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, positions: Positions
    ) -> Tensor:
        """Attention output [B, T, heads, head_dim]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
        if self.kernel in ("efficient", "math"):
            k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        starts = positions.document_starts
        causal_only = starts is None and self.rule.is_causal_only(q.shape[2])
        if causal_only and self.kernel != "blockwise":
            return attention(self.kernel, q, k, v, self.rule.scale).transpose(1, 2)
        if self.kernel == "math":
            return math_attention(self.rule, q, k, v, starts).transpose(1, 2)
        # torch's fused kernels know no soft-cap.
        kernel = self.kernel if self.rule.softcap is None else "blockwise"
        return blockwise_attention(kernel, self.rule, q, k, v, starts).transpose(1, 2)


NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu": F.relu,
}
"""Kind of feed-forward layer -> its non-linearity, which gated kinds multiply by the up
projection.
"""


class Activate(nn.Module):
    """`activate(gate, up)`: gated (SwiGLU, GeGLU) or plain activation (`up` is None)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.function = kind, NONLINEARITIES[kind]

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor | None) -> Tensor:
        """Activated features [B, T, F]."""
        activated = self.function(gate_BTF)
        return activated if up_BTF is None else activated * up_BTF


_token_losses: ContextVar[Callable[[Tensor], None] | None] = ContextVar("losses", default=None)
"""Who observes the loss of each token, which heads sum."""


@contextmanager
def token_losses_observed(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it `observer` gets the losses [N] of the tokens that a head sums, without gradients;
    of a head that takes chunks of them, one chunk after the other.
    """
    token = _token_losses.set(observer)
    try:
        yield
    finally:
        _token_losses.reset(token)


def sum_token_losses(loss_N: Tensor) -> Tensor:
    """The sum, a scalar, of losses that are shown to their observer; a compiled graph has none."""
    if not torch.compiler.is_compiling() and (observer := _token_losses.get()) is not None:
        observer(loss_N.detach())
    return loss_N.sum()


Reduction = Literal["sum", "none"]
"""What a head returns: the sum of its tokens' losses, or each token's."""


class HeadLoss(nn.Module):
    """`head_loss(x, targets)`: output projection and cross entropy, in fp32 or better.

    Args:
        width: Of the residual stream.
        vocab: Entries of the vocabulary.
        softcap: Bound of the logits; None: none.
    """

    def __init__(self, width: int, vocab: int, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, x_BTD: Tensor, targets_BT: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Negative log-likelihood of the valid tokens.

        Args:
            x_BTD: [B, T, D].
            targets_BT: [B, T].
            reduction: As of `F.cross_entropy`. sum: a scalar; none: [B, T], 0 where the target is
                ignored.
        """
        observed = reduction == "sum" and _token_losses.get() is not None
        loss = F.cross_entropy(
            at_least_fp32(soft_cap(F.linear(x_BTD, self.weight), self.softcap).flatten(0, -2)),
            targets_BT.flatten(),
            reduction="none" if observed else reduction,
            ignore_index=IGNORE_INDEX,
        )
        if reduction == "none":
            return loss.view_as(targets_BT)
        return sum_token_losses(loss) if observed else loss


def at_least_fp32(x: Tensor) -> Tensor:
    """Upcast 16-bit tensors to fp32; fp32 and fp64 are returned as they are."""
    return x.float() if x.element_size() < 4 else x
