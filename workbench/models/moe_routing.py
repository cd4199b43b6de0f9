"""Which expert a token goes to, and where it stands among the rows that experts multiply.

Tokens are sorted by expert, so that each expert multiplies one contiguous slice (dropless: Gale et
al. 2022, MegaBlocks, arXiv 2211.15841); with a capacity each expert has a fixed number of rows a
sequence, and what finds none is dropped (Lepikhin et al. 2020, GShard, arXiv 2006.16668). Both
capacity and auxiliary loss are those of one sequence, so that neither depends on how sequences are
spread over ranks.

Shapes: N tokens = B sequences x T, E experts, k choices a token, R rows = N x k (or E x B x
capacity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.seams import at_least_fp32
from workbench.plan.model_shape import Moe, rows_of_an_expert


class Choice(NamedTuple):
    """What a router says: gates and experts [B, T, k], and its auxiliary loss, a scalar or None."""

    gates_BTK: Tensor
    experts_BTK: Tensor
    auxiliary: Tensor | None


class Rows(NamedTuple):
    """Where tokens stand once sorted by expert."""

    tokens_R: Tensor
    """Token of each row."""
    rows_NK: Tensor
    """Row of each choice; any row where it is dropped."""
    kept_NK: Tensor | None
    """Which choices are not dropped; None: all."""
    counts_E: Tensor | None
    """Rows of each expert; None: all the same."""


class Route(nn.Module):
    """`route(x)`: softmax over experts, in fp32 or better, and the top k of it.

    Gates are the softmax's own (Fedus et al. 2021, Switch, 2101.03961; DeepSeekMoE, 2401.06066) or,
    with `renormalise`, divided by their sum (Mixtral, 2401.04088). `whole` turns what this rank
    counts of a sequence into what all do that share the sequence.
    """

    def __init__(self, width: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, width))
        self.whole: Callable[[Tensor], Tensor] = _alone

    def forward(self, x_BTD: Tensor) -> Choice:
        """Gates, experts and auxiliary loss of every token."""
        scores_BTE = _Scores.apply(x_BTD, self.weight).softmax(-1)
        gates, experts = scores_BTE.topk(self.moe.top_k, dim=-1)
        if self.moe.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        wanted = self.training and self.moe.auxiliary_loss > 0
        return Choice(
            gates.to(x_BTD.dtype), experts, self._auxiliary(scores_BTE, experts) if wanted else None
        )

    def _auxiliary(self, scores_BTE: Tensor, experts_BTK: Tensor) -> Tensor:
        """coefficient x sum over sequences and tokens of experts x share of choices x score
        (2101.03961, eq. 4).

        A sequence's mean times its tokens: over the batch's tokens, as the loss is, it is the mean
        over sequences.
        """
        chosen = experts_BTK.flatten(1)
        counts_BE = torch.zeros_like(scores_BTE[:, 0]).scatter_add_(
            1, chosen, torch.ones_like(chosen, dtype=scores_BTE.dtype)
        )
        counts_BE = self.whole(counts_BE)
        shares_BE = counts_BE / counts_BE.sum(-1, keepdim=True) * self.moe.experts
        return self.moe.auxiliary_loss * (shares_BE * scores_BTE.sum(1)).sum()


def dropless(experts_BTK: Tensor, num_experts: int) -> Rows:
    """Every choice a row: sorted by expert, then by token."""
    experts_R = experts_BTK.flatten()
    order = experts_R.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts, dtype=order.dtype, device=order.device)
    counts.scatter_add_(0, experts_R, torch.ones_like(experts_R))
    top_k = experts_BTK.shape[-1]
    return Rows(order // top_k, rows.view(-1, top_k), None, counts)


def limited(experts_BTK: Tensor, moe: Moe) -> Rows:
    """As many rows an expert and sequence as there is capacity for: first choices before second
    ones (2006.16668), then earlier tokens before later ones.

    An empty row repeats the first token; nothing reads what it becomes.
    """
    batch, length, top_k = experts_BTK.shape
    num_experts, room, device = moe.experts, rows_of_an_expert(length, moe), experts_BTK.device
    sequence_BTK = torch.arange(batch, device=device)[:, None, None].expand_as(experts_BTK)
    queue = (sequence_BTK * num_experts + experts_BTK).transpose(1, 2).flatten()  # choices first
    place_BTK = _place(queue, batch * num_experts).view(batch, top_k, length).transpose(1, 2)
    kept = place_BTK < room
    rows = ((experts_BTK * batch + sequence_BTK) * room + place_BTK.clamp(max=room - 1)).reshape(
        -1, top_k
    )
    total = num_experts * batch * room
    tokens = torch.arange(batch * length, device=device)[:, None].expand_as(rows)
    kept_NK = kept.reshape(-1, top_k)
    filled = torch.zeros(total + 1, dtype=rows.dtype, device=device)
    filled.scatter_(0, rows.masked_fill(~kept_NK, total).flatten(), tokens.flatten())
    return Rows(filled[:total], rows, kept_NK, None)


def _place(queue: Tensor, num_queues: int) -> Tensor:
    """How many before it stand in the same queue, for each entry."""
    order = queue.argsort(stable=True)
    counts = torch.zeros(num_queues, dtype=queue.dtype, device=queue.device)
    counts.scatter_add_(0, queue, torch.ones_like(queue))
    starts = counts.cumsum(0) - counts
    ranked = torch.arange(len(queue), device=queue.device) - starts[queue[order]]
    return torch.empty_like(queue).scatter_(0, order, ranked)


def _alone(counts: Tensor) -> Tensor:
    return counts


class _Scores(torch.autograd.Function):
    """x W^T in fp32 or better; only what the model holds anyway is kept for backward, not its
    widened copy.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_ED)
        return F.linear(at_least_fp32(x_BTD), at_least_fp32(weight_ED))

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, weight_ED = ctx.saved_tensors
        outgoing = gradient_BTE @ at_least_fp32(weight_ED)
        weight_gradient = gradient_BTE.flatten(0, -2).T @ at_least_fp32(x_BTD).flatten(0, -2)
        return outgoing.to(x_BTD.dtype), weight_gradient.to(weight_ED.dtype)
