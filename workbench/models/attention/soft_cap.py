"""Soft-caps of logits and of attention scores (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), elementwise (Gemma 2, arXiv 2408.00118), in place of the logits;
    without `cap` the logits.

    The derivative is saved, so that the result may be overwritten.
    """
    capped: Tensor = logits if cap is None else _SoftCap.apply(logits, cap)
    return capped


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(soft_cap_(logits, cap))
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (derivative,) = ctx.saved_tensors
        return derivative.mul_(gradient), None


def soft_cap_(logits: Tensor, cap: float, derivative: Tensor | None = None) -> Tensor:
    """Soft-cap `logits` in place; returns the derivative, 1 - tanh(logits / cap)^2, written into
    `derivative` where it is given.
    """
    tanh = logits.div_(cap).tanh_()
    derivative = torch.mul(tanh, tanh, out=derivative).neg_().add_(1)
    logits.mul_(cap)
    return derivative
