"""MoE routing: which expert a token goes to, and its row among those that experts compute.

Tokens are sorted by expert, so that each expert's GEMM reads one contiguous slice (dropless: Gale
et al. 2022, MegaBlocks, arXiv 2211.15841). With a capacity factor each expert has a fixed number of
rows in every sequence, and choices beyond it are dropped (Lepikhin et al. 2020, GShard, arXiv
2006.16668). Capacity and aux loss are those of one sequence, so that neither depends on how
sequences are distributed over ranks.

Shapes: N tokens = B sequences x T, E experts, k choices a token, R rows = N x k (or E x B x
capacity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.host_counts import kept_for_recomputation
from workbench.models.seams import at_least_fp32
from workbench.plan.model.model_shape import Moe, rows_of_an_expert


class Routing(NamedTuple):
    """A router's output: gates and experts [B, T, k], and the aux loss, a scalar or None."""

    gates_BTK: Tensor
    experts_BTK: Tensor
    aux_loss: Tensor | None


class ExpertRows(NamedTuple):
    """The rows that experts compute, sorted by expert, and which token each is of."""

    tokens_R: Tensor
    """Token of each row."""
    rows_NK: Tensor
    """Row of each choice; any row where it is dropped."""
    kept_NK: Tensor | None
    """Which choices are not dropped; None: all."""
    counts_E: Tensor | None
    """Rows of each expert; None: all the same."""


class Router(nn.Module):
    """Top-k router: scores of experts, in fp32 or better, and its k largest.

    Scores are a softmax over experts, or each expert's sigmoid (DeepSeek-V3, arXiv 2412.19437).
    Gates are the scores (Fedus et al. 2021, Switch, arXiv 2101.03961; DeepSeekMoE, arXiv
    2401.06066) or, with `renormalise`, the scores divided by their sum (Mixtral, arXiv 2401.04088).
    With groups the k come from the best groups (DeepSeek-V2, arXiv 2405.04434).

    `bias` [E] is added to the scores that choose, and to no gate; its gradient is zero.

    Attributes:
        reduce_counts: Sums this rank's counts of a sequence over the ranks that share the sequence
            (context parallelism).
    """

    def __init__(self, width: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, width))
        self.bias = nn.Parameter(torch.empty(moe.experts)) if moe.score_bias else None
        self.reduce_counts: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, x_BTD: Tensor) -> Routing:
        """Gates and experts of every token [B, T, D], and their aux loss in training."""
        logits_BTE = _Scores.apply(x_BTD, self.weight, self.bias)
        softmax = self.moe.scores == "softmax"
        scores_BTE = logits_BTE.softmax(-1) if softmax else logits_BTE.sigmoid()
        # A recomputed layer must not choose again: its activations may differ in the last bit (an
        # all-reduce on NVSwitch adds in any order), and the rows of forward, whose counts are kept,
        # would go to other experts. 16 bits, since they are kept with the layer's input.
        kept = kept_for_recomputation(lambda: self._choices(scores_BTE).to(torch.int16))
        experts = kept.to(torch.int64)
        gates = scores_BTE.gather(-1, experts)
        if self.moe.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        if self.moe.scale != 1.0:
            gates = gates * self.moe.scale
        with_aux_loss = self.training and self.moe.auxiliary_loss > 0
        return Routing(
            gates.to(x_BTD.dtype),
            experts,
            self._aux_loss(scores_BTE, experts) if with_aux_loss else None,
        )

    def _choices(self, scores_BTE: Tensor) -> Tensor:
        """The experts with the largest scores, [B, T, k]."""
        chosen_by = scores_BTE.detach()
        if self.bias is not None:
            chosen_by = chosen_by + self.bias.detach()
        if self.moe.groups is not None:
            chosen_by = self._of_best_groups(chosen_by, self.moe.groups)
        return chosen_by.topk(self.moe.top_k, dim=-1).indices

    def _of_best_groups(self, scores_BTE: Tensor, num_groups: int) -> Tensor:
        """The scores, -inf outside of a token's best groups. A group is as good as its best expert
        (2405.04434), or with a bias as the sum of its best two (2412.19437).
        """
        by_group_BTGE = scores_BTE.unflatten(-1, (num_groups, -1))
        best = by_group_BTGE.topk(2 if self.moe.score_bias else 1, dim=-1).values.sum(-1)
        chosen = best.topk(self.moe.top_groups or num_groups, dim=-1).indices
        others_BTG = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
        masked: Tensor = by_group_BTGE.masked_fill(others_BTG[..., None], -torch.inf).flatten(-2)
        return masked

    def _aux_loss(self, scores_BTE: Tensor, experts_BTK: Tensor) -> Tensor:
        """The load-balancing loss (2101.03961, eq. 4), summed over sequences and tokens.

        coefficient x sum over experts of (share of choices x score) is a sequence's mean. It is
        multiplied by the sequence's tokens: divided by the batch's tokens, as the loss is, it is
        the mean over sequences.
        """
        chosen = experts_BTK.flatten(1)
        counts_BE = torch.zeros_like(scores_BTE[:, 0]).scatter_add_(
            1, chosen, torch.ones_like(chosen, dtype=scores_BTE.dtype)
        )
        counts_BE = self.reduce_counts(counts_BE)
        shares_BE = counts_BE / counts_BE.sum(-1, keepdim=True) * self.moe.experts
        if self.moe.scores == "sigmoid":  # 2412.19437, eq. 20
            scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        return self.moe.auxiliary_loss * (shares_BE * scores_BTE.sum(1)).sum()


def dropless_rows(experts_BTK: Tensor, num_experts: int) -> ExpertRows:
    """One row for every choice, sorted by expert and then by token."""
    experts_R = experts_BTK.flatten()
    order = experts_R.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts, dtype=order.dtype, device=order.device)
    counts.scatter_add_(0, experts_R, torch.ones_like(experts_R))
    top_k = experts_BTK.shape[-1]
    return ExpertRows(order // top_k, rows.view(-1, top_k), None, counts)


def capacity_rows(experts_BTK: Tensor, moe: Moe) -> ExpertRows:
    """A fixed number of rows for every expert and sequence: the capacity.

    First choices take rows before second ones (2006.16668), and earlier tokens before later ones.
    An unused row repeats the first token; nothing reads its output.
    """
    batch, length, top_k = experts_BTK.shape
    num_experts, capacity, device = (
        moe.experts,
        rows_of_an_expert(length, moe),
        experts_BTK.device,
    )
    sequence_BTK = torch.arange(batch, device=device)[:, None, None].expand_as(experts_BTK)
    queue = (
        (sequence_BTK * num_experts + experts_BTK).transpose(1, 2).flatten()
    )  # all first choices first
    place_BTK = _place(queue, batch * num_experts).view(batch, top_k, length).transpose(1, 2)
    kept = place_BTK < capacity
    rows = (
        (experts_BTK * batch + sequence_BTK) * capacity + place_BTK.clamp(max=capacity - 1)
    ).reshape(-1, top_k)
    total = num_experts * batch * capacity
    tokens = torch.arange(batch * length, device=device)[:, None].expand_as(rows)
    # Dropped choices write to one extra row, which is cut off: no boolean indexing, whose output
    # size would have to be read from the device.
    kept_NK = kept.reshape(-1, top_k)
    filled = torch.zeros(total + 1, dtype=rows.dtype, device=device)
    filled.scatter_(0, rows.masked_fill(~kept_NK, total).flatten(), tokens.flatten())
    return ExpertRows(filled[:total], rows, kept_NK, None)


def _place(queue: Tensor, num_queues: int) -> Tensor:
    """For each entry, the number of earlier entries of the same queue."""
    order = queue.argsort(stable=True)
    counts = torch.zeros(num_queues, dtype=queue.dtype, device=queue.device)
    counts.scatter_add_(0, queue, torch.ones_like(queue))
    starts = counts.cumsum(0) - counts
    ranked = torch.arange(len(queue), device=queue.device) - starts[queue[order]]
    return torch.empty_like(queue).scatter_(0, order, ranked)


def _unchanged(counts: Tensor) -> Tensor:
    return counts


class _Scores(torch.autograd.Function):
    """x W^T in fp32 or better, which saves x and W in their own dtype for backward.

    `F.linear` on the upcast tensors would keep the fp32 copies. The bias of the choice is no part
    of the scores, and is here for its gradient of zero: it is stored as any parameter is.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.bias, ctx.dtype = None if bias_E is None else bias_E.shape, x_BTD.dtype
        # A frozen weight has no gradient, which alone needs the input.
        ctx.save_for_backward(x_BTD if ctx.needs_input_grad[1] else None, weight_ED)
        return F.linear(at_least_fp32(x_BTD), at_least_fp32(weight_ED))

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x_BTD, weight_ED = ctx.saved_tensors
        x_gradient = (gradient_BTE @ at_least_fp32(weight_ED)).to(ctx.dtype)
        if x_BTD is None:
            return x_gradient, None, None
        weight_gradient = gradient_BTE.flatten(0, -2).T @ at_least_fp32(x_BTD).flatten(0, -2)
        no_gradient = None if ctx.bias is None else weight_ED.new_zeros(ctx.bias)
        return x_gradient, weight_gradient.to(weight_ED.dtype), no_gradient
