"""Embedding, output projection and cross entropy with the vocabulary split over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.kernels import cross_entropy as fused
from workbench.models.seams import IGNORE, at_least_fp32
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.column_parallel import columns
from workbench.parallel.tensor.tensor_collectives import all_reduce, reduce_from, scatter_tokens


class VocabularyEmbedding(nn.Module):
    """Rows [start, stop) of the embedding; other ranks' tokens look up nothing. Weight [vocab /
    ranks, D].

    With `sequence` each rank keeps a run of the tokens.
    """

    def __init__(
        self, weight: nn.Parameter, rows: tuple[int, int], axis: MeshAxis, sequence: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.rows, self.axis, self.sequence = weight, rows, axis, sequence

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embedded tokens [B, T, D], equal on every rank; with `sequence` [B, T / ranks, D]."""
        x_BTD = look_up(tokens_BT, self.weight, self.rows)
        return scatter_tokens(x_BTD, self.axis) if self.sequence else reduce_from(x_BTD, self.axis)


def look_up(tokens_BT: Tensor, weight_VD: Tensor, rows: tuple[int, int]) -> Tensor:
    """Rows of a table that holds [start, stop) of the vocabulary: [B, T, D], zero for tokens that
    are not there.
    """
    start, stop = rows
    foreign_BT = (tokens_BT < start) | (tokens_BT >= stop)
    local_BT = (tokens_BT - start).masked_fill_(foreign_BT, 0)
    return F.embedding(local_BT, weight_VD).masked_fill(foreign_BT[..., None], 0)


def table_gradient(
    tokens_BT: Tensor, gradient_BTD: Tensor, rows: tuple[int, int], room: int
) -> Tensor:
    """Gradient [room, D] of a table that holds [start, stop) of the vocabulary; foreign tokens add
    nothing.
    """
    start, stop = rows
    foreign_BT = (tokens_BT < start) | (tokens_BT >= stop)
    local_BT = (tokens_BT - start).masked_fill_(foreign_BT, room)  # a row more takes them
    table_VD = gradient_BTD.new_zeros(room + 1, gradient_BTD.shape[-1])
    return table_VD.index_add_(0, local_BT.flatten(), gradient_BTD.flatten(0, -2))[:room]


class VocabularyHeadLoss(nn.Module):
    """The head_loss seam over a split vocabulary. Weight [vocab / ranks, D]; rows past `rows` are
    padding.

    With `sequence` its input is a run of the tokens, its targets are all.
    """

    kernels = "eager"
    """What runs the loss: the plan's kernels, set once the module is built."""
    plain_below = 0
    """Of how many logits on."""

    def __init__(
        self, weight: nn.Parameter, rows: tuple[int, int], axis: MeshAxis, sequence: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.rows, self.axis, self.sequence = weight, rows, axis, sequence

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum over valid tokens of the negative log-likelihood; a scalar, equal on every rank."""
        (logits_BTV,) = columns(x_BTD, [(self.weight, None)], self.axis, self.sequence)
        return cross_entropy(
            logits_BTV.flatten(0, -2),
            targets_BT.flatten(),
            self.rows,
            self.axis,
            runs(self, logits_BTV),
        )


def runs(head: Any, logits: Tensor) -> str:
    """The kernels that make the loss of so many logits: those of the `head`, or plain ones for
    few.
    """
    return str(head.kernels) if logits.numel() >= head.plain_below else "eager"


def cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    rows: tuple[int, int],
    axis: MeshAxis,
    kernels: str = "eager",
) -> Tensor:
    """Summed cross entropy of logits whose vocabulary is split over `axis`; `logits_NV` is used up.

    Whatever the kernels, the ranks reduce a maximum and then two sums a token.
    """
    if kernels != "eager":
        reduce = (
            partial(all_reduce, axis=axis, op=dist.ReduceOp.MAX),
            partial(all_reduce, axis=axis),
        )
        return fused.cross_entropy(logits_NV, targets_N, rows, reduce=reduce, kernels=kernels)
    loss: Tensor = _CrossEntropy.apply(logits_NV, targets_N, rows, axis)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy from three numbers a token: the maximum, the sum of exponentials and the
    target's logit.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, rows: tuple[int, int], axis: MeshAxis
    ) -> Tensor:
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
