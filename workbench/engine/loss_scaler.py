"""Dynamic loss scaling for fp16, in step on all ranks (Micikevicius et al. 2018, arXiv 1710.03740).

The scale and its counter are tensors that nothing reads back within a step. Whether a gradient has
overflowed is told by the squared norm that all ranks add anyway: a sum with an infinity or a NaN in
it is not finite, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.parallel.layout import Layout
    from workbench.parallel.mesh import Mesh

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""As in `torch.amp.GradScaler`: first scale, its factors, and the good steps in a row after which
it grows.
"""


class LossScaler:
    """What the loss is multiplied by, so that small gradients are not lost in fp16.

    A step whose gradients overflow is skipped and halves the scale; `INTERVAL` good ones in a row
    double it. `scale` and `good`, the good steps since it last changed, are fp32 scalars on the
    device. `skipped` counts the steps of the run that were skipped, as far as `tell` has said.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL, device=device)
        self.good = torch.zeros((), device=device)
        self.skipped = 0

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        """After a step; `found` is 1 where its gradients overflowed, else 0."""
        self.good.add_(1).mul_(1 - found)
        grown = torch.where(self.good >= INTERVAL, self.scale * GROWTH, self.scale)
        kept = torch.where(torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(found > 0, self.scale * BACKOFF, kept))
        self.good.mul_(self.good < INTERVAL)

    def tell(self, skipped: bool) -> None:
        """What the host has read of a step."""
        self.skipped += skipped

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as plain data; equal on every rank."""
        return {"scale": self.scale.item(), "good": self.good.item(), "skipped": self.skipped}

    @torch.no_grad()
    def load(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self.scale.fill_(state["scale"])
        self.good.fill_(state["good"])
        self.skipped = int(state["skipped"])


def overflow(square: Tensor) -> Tensor:
    """1 where the squared gradient norm is not finite, else 0; in fp32, as fused optimizers want
    it.
    """
    return 1 - torch.isfinite(square).to(torch.float32)


def unowned(
    gradients: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh
) -> Tensor | float:
    """0, or NaN where a gradient here has overflowed that another rank counts: to be added to this
    rank's square.
    """
    others = [g for name, g in gradients.items() if not layouts[name].is_owner(mesh)]
    if not others:
        return 0.0
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in others]).sum() * 0
