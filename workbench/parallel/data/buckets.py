"""Flat buckets: some tensors side by side in one, so that few large collectives carry many gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis

PIECE = 2**22
"""Entries of a narrow gradient that are widened at once."""


def add_narrow(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a total of another dtype, piece by piece: widening it whole would double its memory."""
    for into, piece in zip(total.flatten().split(PIECE), gradient.flatten().split(PIECE)):
        into.add_(piece.to(into.dtype))


class Bucket:
    """Some parameters' gradients side by side in one flat tensor, summed over the axes `sums`."""

    def __init__(
        self, parameters: list[tuple[str, nn.Parameter]], dtype: torch.dtype, sums: tuple[MeshAxis, ...]
    ) -> None:
        self.sums = sums
        device = parameters[0][1].device
        self.flat = torch.zeros(sum(p.numel() for _, p in parameters), dtype=dtype, device=device)
        pieces = self.flat.split([p.numel() for _, p in parameters])
        self.views = {name: piece.view_as(p) for (name, p), piece in zip(parameters, pieces)}
        self.pending = 0
        self.work: list[dist.Work] | None = None


def grouped(
    parameters: dict[str, nn.Parameter],
    sums: Mapping[str, tuple[MeshAxis, ...]],
    dtype: torch.dtype,
    bucket_bytes: float,
) -> Iterable[list[tuple[str, nn.Parameter]]]:
    """Parameters in buckets of at most `bucket_bytes` (a larger one stands alone), in the order of backward.

    Those that are summed over different axes never share a bucket.
    """
    open_: dict[tuple[MeshAxis, ...], tuple[list[tuple[str, nn.Parameter]], int]] = {}
    for name, parameter in reversed(parameters.items()):
        group, size = open_.get(sums[name], ([], 0))
        nbytes = parameter.numel() * dtype.itemsize
        if group and size + nbytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        open_[sums[name]] = group, size + nbytes
    for group, _ in open_.values():
        yield group
