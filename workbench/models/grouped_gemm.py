"""Many products of one shape: rows sorted by group, each group times its own weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Grouped(nn.Module):
    """As many linear layers as groups, weights stacked: [groups, out, in], biases [groups, out]."""

    def __init__(self, groups: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs)) if bias else None
        self.bias_share = 1.0
        """What of the bias is added here, where several ranks' results are summed."""

    def forward(self, x_RI: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [R, in], the first `counts[0]` of group 0 and so on, to [R, out]."""
        bias = (
            self.bias if self.bias is None or self.bias_share == 1 else self.bias * self.bias_share
        )
        return _GroupedLinear.apply(x_RI, self.weight, bias, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    """One product a group, written into one result: no list of pieces lives beside it, forward or
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight)
        ctx.counts, ctx.biased = counts, bias is not None
        y_RO = x_RI.new_empty(len(x_RI), weight.shape[1])
        for group, part in _parts(counts):
            if bias is None:
                torch.mm(x_RI[part], weight[group].T, out=y_RO[part])
            else:
                torch.addmm(bias[group], x_RI[part], weight[group].T, out=y_RO[part])
        return y_RO

    @staticmethod
    def backward(
        ctx: Any, gradient_RO: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x_RI, weight = ctx.saved_tensors
        x_gradient, weight_gradient = torch.empty_like(x_RI), torch.zeros_like(weight)
        bias_gradient = weight.new_zeros(weight.shape[:2]) if ctx.biased else None
        for group, part in _parts(ctx.counts):
            torch.mm(gradient_RO[part], weight[group], out=x_gradient[part])
            torch.mm(gradient_RO[part].T, x_RI[part], out=weight_gradient[group])
            if bias_gradient is not None:
                bias_gradient[group] = gradient_RO[part].sum(0)
        return x_gradient, weight_gradient, bias_gradient, None


def _parts(counts: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Groups that have rows, and which."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count
