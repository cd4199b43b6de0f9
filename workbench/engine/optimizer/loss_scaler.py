"""Dynamic loss scaling for fp16, equal on all ranks (Micikevicius et al. 2018, arXiv 1710.03740).

The scale and its counter stay on the device: a step does not synchronise with the host. Overflow is
detected in the squared gradient norm, which is all-reduced anyway: a sum with an infinity or NaN in
it is not finite, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Defaults of `torch.amp.GradScaler`."""
MIN_SCALE = 1.0
"""Least scale, as DeepSpeed's `min_loss_scale` and Megatron-LM's `--min-loss-scale`: gradients that
overflow without a factor overflow with one too.
"""
STUCK_STEPS = 3
"""Skipped steps in a row that no lower scale makes finite, after which training cannot continue:
the weights stay as they are, and only the data differ.
"""


class LossScaler:
    """Scale of the loss, so that small gradients do not underflow in fp16.

    A step whose gradients overflow is skipped and halves the scale; `GROWTH_INTERVAL` good steps in
    a row double it. `scale` and `good_steps` (since the scale last changed) are fp32 scalars on the
    device. `skipped` is the number of skipped steps that the host has read (`count_skipped`), and
    `stuck` how many of the last steps no lower scale would have made finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.skipped = self.stuck = 0

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        """Update the scale after a step; `found` is 1 where its gradients overflowed, else 0."""
        self.good_steps.add_(1).mul_(1 - found)
        grown = torch.where(
            self.good_steps >= GROWTH_INTERVAL, self.scale * GROWTH_FACTOR, self.scale
        )
        kept = torch.where(torch.isfinite(grown), grown, self.scale)
        lower = (self.scale * BACKOFF_FACTOR).clamp(min=MIN_SCALE)
        self.scale.copy_(torch.where(found > 0, lower, kept))
        self.good_steps.mul_(self.good_steps < GROWTH_INTERVAL)

    def count_skipped(self, skipped: bool, loss: float, scale: float) -> None:
        """Count a step, once the host has read whether it was skipped, its loss and its scale.

        The loss is scaled in fp32 after forward: one that is not finite overflowed at any scale.
        """
        self.skipped += skipped
        stuck = not math.isfinite(loss) or (skipped and scale <= MIN_SCALE)
        self.stuck = self.stuck + 1 if stuck else 0

    def state(self) -> dict[str, float]:
        """State for a checkpoint, as plain data; equal on every rank."""
        return {"scale": self.scale.item(), "good": self.good_steps.item(), "skipped": self.skipped}

    @torch.no_grad()
    def load(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good"])
        self.skipped = int(state["skipped"])


def found_inf(norm: Tensor) -> Tensor:
    """1 where the gradient norm is not finite, else 0; fp32, as fused optimizers expect."""
    return 1 - torch.isfinite(norm).to(torch.float32)
