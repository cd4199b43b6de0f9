"""Grouped GEMM: rows sorted by group, each group's rows times the group's own weight (MoE
experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """One linear layer for each group; weights stacked [groups, out, in], biases [groups, out]."""

    def __init__(self, groups: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs)) if bias else None
        self.bias_share = 1.0
        """The share of the bias that is added here, where several ranks' results are summed."""

    def forward(self, x_RI: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [R, in], the first `counts[0]` of group 0 and so on, to [R, out]."""
        bias = (
            self.bias if self.bias is None or self.bias_share == 1 else self.bias * self.bias_share
        )
        output: Tensor = _GroupedGemm.apply(x_RI, self.weight, bias, tuple(counts))
        return output


class _GroupedGemm(torch.autograd.Function):
    """One GEMM for each group, written straight into one output.

    Autograd on split, matmul and concatenate would hold a list of chunks beside it, in forward and
    in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight)
        ctx.counts, ctx.has_bias = counts, bias is not None
        y_RO = x_RI.new_empty(len(x_RI), weight.shape[1])
        for group, rows in _group_slices(counts):
            if bias is None:
                torch.mm(x_RI[rows], weight[group].T, out=y_RO[rows])
            else:
                torch.addmm(bias[group], x_RI[rows], weight[group].T, out=y_RO[rows])
        return y_RO

    @staticmethod
    def backward(
        ctx: Any, gradient_RO: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x_RI, weight = ctx.saved_tensors
        x_gradient, weight_gradient = torch.empty_like(x_RI), torch.zeros_like(weight)
        bias_gradient = weight.new_zeros(weight.shape[:2]) if ctx.has_bias else None
        for group, rows in _group_slices(ctx.counts):
            torch.mm(gradient_RO[rows], weight[group], out=x_gradient[rows])
            torch.mm(gradient_RO[rows].T, x_RI[rows], out=weight_gradient[group])
            if bias_gradient is not None:
                bias_gradient[group] = gradient_RO[rows].sum(0)
        return x_gradient, weight_gradient, bias_gradient, None


def _group_slices(counts: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """(group, its rows) for every group that has rows."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count
