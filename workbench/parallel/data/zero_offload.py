"""What lives in host memory (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840): this rank's pieces,
stepped there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.parallel.data.bucket_parameters import Unit, Whole


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, page-locked where a CUDA device copies from and to it."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


class Host:
    """Host copies of the pieces that this rank steps: values, and the gradients that come down for
    them.

    Where the parameters' own pieces live on the host, they are stepped themselves.
    """

    def __init__(self, buckets: Sequence[tuple[Whole | Unit, Tensor]]) -> None:
        self._pairs = [
            (
                values,
                values.piece if values.on_host else to_host(values.piece),
                gradient,
                to_host(gradient),
            )
            for values, gradient in buckets
        ]
        self.values = {
            n: v
            for values, own, _, _ in self._pairs
            for n, v in values.packing.own_views(own).items()
        }
        self.gradients = {
            n: v
            for values, _, _, own in self._pairs
            for n, v in values.packing.own_views(own).items()
        }

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy the gradients down, and wait until they are there."""
        for _, _, gradient, own in self._pairs:
            own.copy_(gradient, non_blocking=True)
        if any(gradient.is_cuda for _, _, gradient, _ in self._pairs):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def push(self) -> None:
        """Copy the stepped values up."""
        for values, own, _, _ in self._pairs:
            if own is not values.piece:
                values.piece.copy_(own, non_blocking=True)

    def lasting(self) -> dict[str, list[Tensor]]:
        """What lives on the host from step to step, by category of the memory vocabulary."""
        return {
            "parameters": [own for values, own, _, _ in self._pairs if values.on_host],
            "communication": [
                *(own for values, own, _, _ in self._pairs if not values.on_host),
                *(own for _, _, _, own in self._pairs),
            ],
        }
