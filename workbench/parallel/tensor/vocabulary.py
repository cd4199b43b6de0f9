"""Embedding, output projection and cross entropy with the vocabulary split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.seams import IGNORE, at_least_fp32
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.collectives import all_reduce, copy_to, reduce_from


class VocabularyEmbedding(nn.Module):
    """Rows [start, stop) of the embedding; other ranks' tokens look up nothing. Weight [vocab / ranks, D]."""

    def __init__(self, weight: nn.Parameter, rows: tuple[int, int], axis: MeshAxis) -> None:
        super().__init__()
        self.weight, self.rows, self.axis = weight, rows, axis

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embedded tokens [B, T, D], equal on every rank."""
        start, stop = self.rows
        foreign_BT = (tokens_BT < start) | (tokens_BT >= stop)
        local_BT = (tokens_BT - start).masked_fill_(foreign_BT, 0)
        x_BTD = F.embedding(local_BT, self.weight).masked_fill(foreign_BT[..., None], 0)
        return reduce_from(x_BTD, self.axis)


class VocabularyHeadLoss(nn.Module):
    """The head_loss seam over a split vocabulary. Weight [vocab / ranks, D]; rows past `rows` are padding."""

    def __init__(self, weight: nn.Parameter, rows: tuple[int, int], axis: MeshAxis) -> None:
        super().__init__()
        self.weight, self.rows, self.axis = weight, rows, axis

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum over valid tokens of the negative log-likelihood; a scalar, equal on every rank."""
        logits_NV = F.linear(copy_to(x_BTD, self.axis), self.weight).flatten(0, -2)
        return _CrossEntropy.apply(logits_NV, targets_BT.flatten(), self.rows, self.axis)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy from three numbers a token: the maximum, the sum of exponentials and the target's logit."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, rows: tuple[int, int], axis: MeshAxis) -> Tensor:
        start, stop = rows
        dtype = logits_NV.dtype
        logits_NV = at_least_fp32(logits_NV)
        exclude_padding(logits_NV, stop - start)
        top_N = all_reduce(logits_NV.amax(-1), axis, dist.ReduceOp.MAX)
        logits_NV = logits_NV.sub_(top_N[:, None])
        local_N = (targets_N - start).clamp(0, max(stop - start - 1, 0))
        mine_N = (targets_N >= start) & (targets_N < stop)
        target_N = logits_NV.gather(1, local_N[:, None])[:, 0].masked_fill_(~mine_N, 0)
        weights_NV = logits_NV.exp_()
        statistics_2N = all_reduce(torch.stack((weights_NV.sum(-1), target_N)), axis)
        weights_NV.div_(statistics_2N[0][:, None])
        valid_N = targets_N != IGNORE
        ctx.save_for_backward(weights_NV, local_N, mine_N, valid_N)
        ctx.dtype = dtype
        return ((statistics_2N[0].log() - statistics_2N[1]) * valid_N).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_NV, local_N, mine_N, valid_N = ctx.saved_tensors
        softmax_NV.scatter_add_(1, local_N[:, None], -mine_N[:, None].to(softmax_NV.dtype))
        softmax_NV.mul_((gradient * valid_N)[:, None])
        return softmax_NV.to(ctx.dtype), None, None, None


def exclude_padding(logits_NV: Tensor, num_rows: int) -> None:
    """Keep padded vocabulary entries out of the softmax, in place."""
    logits_NV[:, num_rows:] = -torch.inf
