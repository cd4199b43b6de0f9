"""Auxiliary losses of stages that do not hold the head, and of ranks that share one computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HandOn:
    """Lets a stage's auxiliary loss act without the head: its gradient joins the output's, its
    value is kept.

    `start` says what a step's losses are multiplied by; `total` is the sum of what was multiplied
    since, or None. The executor then runs one backward a stage, and knows of no second loss (as in
    DeepSeek's released model code).
    """

    def __init__(self) -> None:
        self.scale: Tensor | float = 1.0
        self.total: Tensor | None = None

    def start(self, scale: Tensor | float) -> None:
        """Begin a step."""
        self.scale, self.total = scale, None

    def added_to(self, loss: Tensor | None) -> Tensor | None:
        """The step's loss of this rank's head, if it has one, and `total`."""
        return self.total if loss is None else loss if self.total is None else loss + self.total

    def __call__(self, x_BTD: Tensor, auxiliary: Tensor) -> Tensor:
        """The output, unchanged."""
        loss = auxiliary * self.scale
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return _Join.apply(x_BTD, loss)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_BTD, gradient_BTD.new_ones((), dtype=ctx.like)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.share, None


def share_of(loss: Tensor, share: float) -> Tensor:
    """A loss that several ranks compute alike and whose gradients they add: whole in value, in part
    backward.
    """
    return _Share.apply(loss, share)
