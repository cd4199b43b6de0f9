"""The MoE aux loss (load balancing) of pipeline stages without the head, and of tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AuxLossCarrier:
    """Attaches a stage's aux loss to its output, and adds its value to the step's total.

    The executor then runs one backward for each stage and needs no second loss (as Megatron-LM's
    MoEAuxLossAutoScaler and DeepSeek's released model do).

    Attributes:
        scale: What a step's aux losses are multiplied by, as the loss is.
        total: Sum of the scaled aux losses since `start`, or None.
    """

    def __init__(self) -> None:
        self.scale: Tensor | float = 1.0
        self.total: Tensor | None = None

    def start(self, scale: Tensor | float) -> None:
        """Start a step with this scale."""
        self.scale, self.total = scale, None

    def added_to(self, loss: Tensor | None) -> Tensor | None:
        """The step's loss on this rank: that of its head, if it has one, plus `total`."""
        return self.total if loss is None else loss if self.total is None else loss + self.total

    def __call__(self, x_BTD: Tensor, aux_loss: Tensor) -> Tensor:
        """The stage's output [B, T, D], unchanged, with the loss (a scalar) attached to its
        graph.
        """
        loss = aux_loss * self.scale
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        output: Tensor = _AttachAuxLoss.apply(x_BTD, loss)
        return output


class _AttachAuxLoss(torch.autograd.Function):
    """Identity on x, whose backward gives the loss a gradient of 1: as if it were added to the
    loss.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_BTD, gradient_BTD.new_ones((), dtype=ctx.dtype)


class _ScaleGradient(torch.autograd.Function):
    """Identity, whose backward multiplies the gradient by `scale`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def scale_gradient(loss: Tensor, scale: float) -> Tensor:
    """A loss with its full value, whose gradient is multiplied by `scale` in backward.

    For one that several ranks compute alike and whose gradients they sum.
    """
    output: Tensor = _ScaleGradient.apply(loss, scale)
    return output
