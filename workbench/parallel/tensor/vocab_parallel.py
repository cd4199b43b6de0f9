"""Vocabulary parallelism: embedding, output projection and cross entropy sharded by vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.kernels import cross_entropy as fused
from workbench.models.attention.soft_cap import soft_cap
from workbench.models.seams import IGNORE_INDEX, Reduction, at_least_fp32, sum_token_losses
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.column_parallel import column_parallel_linear
from workbench.parallel.tensor.tensor_collectives import (
    all_reduce,
    reduce_from_tensor_region,
    scatter_tokens,
)


class VocabParallelEmbedding(nn.Module):
    """Vocabulary-parallel embedding: a rank looks up the tokens in its rows, and ranks sum.

    Args:
        weight: [vocab / ranks, D], padding included.
        rows: [start, stop) of the vocabulary that this rank holds.
        axis: The tensor axis.
        sequence: Whether the sum is reduce-scattered by tokens instead of all-reduced.
    """

    def __init__(
        self, weight: nn.Parameter, rows: tuple[int, int], axis: MeshAxis, sequence: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.rows, self.axis, self.sequence = weight, rows, axis, sequence

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens [B, T] to [B, T, D], or with sequence parallelism [B, T / ranks, D]."""
        x_BTD = embedding_lookup(tokens_BT, self.weight, self.rows)
        return (
            scatter_tokens(x_BTD, self.axis)
            if self.sequence
            else reduce_from_tensor_region(x_BTD, self.axis)
        )


def embedding_lookup(tokens_BT: Tensor, weight_VD: Tensor, rows: tuple[int, int]) -> Tensor:
    """Look up tokens [B, T] in a table of vocabulary [start, stop): [B, T, D], 0 for other
    tokens.
    """
    start, stop = rows
    absent_BT = (tokens_BT < start) | (tokens_BT >= stop)
    local_BT = (tokens_BT - start).masked_fill_(absent_BT, 0)
    return F.embedding(local_BT, weight_VD).masked_fill(absent_BT[..., None], 0)


def embedding_gradient(
    tokens_BT: Tensor, gradient_BTD: Tensor, rows: tuple[int, int], num_rows: int
) -> Tensor:
    """Gradient [num_rows, D] of a table of vocabulary [start, stop); other tokens add nothing."""
    start, stop = rows
    absent_BT = (tokens_BT < start) | (tokens_BT >= stop)
    local_BT = (tokens_BT - start).masked_fill_(absent_BT, num_rows)  # an extra row takes them
    table_VD = gradient_BTD.new_zeros(num_rows + 1, gradient_BTD.shape[-1])
    return table_VD.index_add_(0, local_BT.flatten(), gradient_BTD.flatten(0, -2))[:num_rows]


class VocabParallelHeadLoss(nn.Module):
    """The head_loss seam, sharded by vocabulary: column-parallel projection and cross entropy.

    No rank ever holds the logits of the whole vocabulary.

    Args:
        weight: [vocab / ranks, D]; rows beyond those of `rows` are padding.
        rows: [start, stop) of the vocabulary that this rank holds.
        axis: The tensor axis.
        sequence: Whether the input is sharded by tokens; targets are those of all tokens.
        softcap: Bound of the logits; None: none.
    """

    kernels = "eager"
    """Kernels of the loss: the plan's, set once the module is built."""
    plain_below = 0
    """Minimum number of logits for these kernels; below it the loss runs in eager mode."""

    def __init__(
        self,
        weight: nn.Parameter,
        rows: tuple[int, int],
        axis: MeshAxis,
        sequence: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.rows, self.axis, self.sequence = weight, rows, axis, sequence
        self.softcap = softcap

    def forward(self, x_BTD: Tensor, targets_BT: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Negative log-likelihood of the valid tokens, equal on every rank: their sum, a scalar, or
        with the reduction none [B, T].
        """
        (logits_BTV,) = column_parallel_linear(
            x_BTD, [(self.weight, None)], self.axis, self.sequence
        )
        logits_BTV = soft_cap(logits_BTV, self.softcap)
        loss = vocab_parallel_cross_entropy(
            logits_BTV.flatten(0, -2),
            targets_BT.flatten(),
            self.rows,
            self.axis,
            loss_kernels(self, logits_BTV),
            reduction,
        )
        return loss if reduction == "sum" else loss.view_as(targets_BT)


def loss_kernels(head: Any, logits: Tensor) -> str:
    """The kernels of the loss of these logits: those of `head`, or eager if there are few."""
    return str(head.kernels) if logits.numel() >= head.plain_below else "eager"


def vocab_parallel_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    rows: tuple[int, int],
    axis: MeshAxis,
    kernels: str = "eager",
    reduction: Reduction = "sum",
) -> Tensor:
    """Cross entropy of logits that are sharded by vocabulary over `axis`.

    Ranks all-reduce three numbers a token, whatever the kernels: the maximum, then the sum of
    exponentials and the target's logit together.

    Args:
        logits_NV: [N, vocab / ranks]; overwritten.
        targets_N: [N], of the whole vocabulary.
        rows: [start, stop) of the vocabulary that this rank holds.
        kernels: "eager", "compiled" or "fused".
        reduction: sum over tokens, or none.

    Returns:
        A scalar, or [N] without reduction; equal on every rank.
    """
    if kernels != "eager":
        reduce = (
            partial(all_reduce, axis=axis, op=dist.ReduceOp.MAX),
            partial(all_reduce, axis=axis),
        )
        return fused.cross_entropy(
            logits_NV, targets_N, rows, reduce=reduce, kernels=kernels, reduction=reduction
        )
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits_NV, targets_N, rows, axis, reduction)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy in place of the logits, which become the softmax that backward needs.

    loss = log(sum of exp(logit - max)) - (target's logit - max). Backward needs no collective: each
    rank has its part of the softmax, and the rank with the target subtracts 1 there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        rows: tuple[int, int],
        axis: MeshAxis,
        reduction: Reduction,
    ) -> Tensor:
        start, stop = rows
        dtype = logits_NV.dtype
        logits_NV = at_least_fp32(logits_NV)
        mask_vocab_padding(logits_NV, stop - start)
        max_N = all_reduce(logits_NV.amax(-1), axis, dist.ReduceOp.MAX)
        logits_NV = logits_NV.sub_(max_N[:, None])
        local_N = (targets_N - start).clamp(0, max(stop - start - 1, 0))
        mine_N = (targets_N >= start) & (targets_N < stop)
        target_N = logits_NV.gather(1, local_N[:, None])[:, 0].masked_fill_(~mine_N, 0)
        exp_NV = logits_NV.exp_()
        sums_2N = all_reduce(torch.stack((exp_NV.sum(-1), target_N)), axis)
        exp_NV.div_(sums_2N[0][:, None])
        valid_N = targets_N != IGNORE_INDEX
        ctx.save_for_backward(exp_NV, local_N, mine_N, valid_N)
        ctx.dtype = dtype
        loss_N = (sums_2N[0].log() - sums_2N[1]) * valid_N
        return loss_N if reduction == "none" else sum_token_losses(loss_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax_NV, local_N, mine_N, valid_N = ctx.saved_tensors
        softmax_NV.scatter_add_(1, local_N[:, None], -mine_N[:, None].to(softmax_NV.dtype))
        softmax_NV.mul_((gradient * valid_N)[:, None])
        return softmax_NV.to(ctx.dtype), None, None, None, None


def mask_vocab_padding(logits_NV: Tensor, num_rows: int) -> None:
    """Set logits of padding to -inf, in place, so that the softmax gives them 0."""
    logits_NV[:, num_rows:] = -torch.inf
