"""Gradients in flat buckets, summed over the data axis while backward still runs.

Gradients are summed, not averaged: the loss is already divided by the step's global number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.parallel.data.collectives import start_sum
from workbench.parallel.mesh import MeshAxis

PIECE = 2**22
"""Entries of a narrow gradient that are widened at once."""


def add_narrow(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a total of another dtype, piece by piece: widening it whole would double its memory."""
    for into, piece in zip(total.flatten().split(PIECE), gradient.flatten().split(PIECE)):
        into.add_(piece.to(into.dtype))


class Bucket:
    """Some parameters' gradients side by side in one flat tensor."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        device = parameters[0][1].device
        self.flat = torch.zeros(sum(p.numel() for _, p in parameters), dtype=dtype, device=device)
        pieces = self.flat.split([p.numel() for _, p in parameters])
        self.views = {name: piece.view_as(p) for (name, p), piece in zip(parameters, pieces)}
        self.pending = 0
        self.work: dist.Work | None = None


class GradientBuckets:
    """All gradients of a rank, accumulated over microbatches and reduced once a step.

    Where a parameter has the gradients' dtype its `.grad` is the view itself, and autograd adds in place; otherwise
    the 16-bit gradient is added to the view and dropped. Buckets follow the order in which backward finishes.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        dtype: torch.dtype,
        axis: MeshAxis,
        bucket_bytes: float,
        overlap: bool,
    ) -> None:
        self.axis, self.overlap = axis, overlap
        self.buckets = [Bucket(group, dtype) for group in _grouped(parameters, dtype, bucket_bytes)]
        self.gradients: dict[str, Tensor] = {}
        self._reducing = False
        for bucket in self.buckets:
            self.gradients.update(bucket.views)
            for name, view in bucket.views.items():
                parameters[name].grad = view if parameters[name].dtype == dtype else None
                parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, bucket, view))

    def zero(self) -> None:
        """Start a step with gradients of zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def expect_last(self) -> None:
        """The next backward is the step's last: with `overlap`, a bucket is summed as soon as it is complete."""
        self._reducing = self.overlap
        for bucket in self.buckets:
            bucket.pending = len(bucket.views)

    def reduce(self) -> None:
        """Sum whatever is not being summed yet, and wait for all."""
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.work = start_sum(bucket.flat, self.axis)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = None
        self._reducing = False

    def _arrived(self, bucket: Bucket, view: Tensor, parameter: nn.Parameter) -> None:
        if parameter.grad is not view:
            assert parameter.grad is not None
            add_narrow(view, parameter.grad)
            parameter.grad = None
        bucket.pending -= 1
        if self._reducing and bucket.pending == 0:
            bucket.work = start_sum(bucket.flat, self.axis)


def _grouped(
    parameters: dict[str, nn.Parameter], dtype: torch.dtype, bucket_bytes: float
) -> Iterable[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in reversed(parameters.items()):
        nbytes = parameter.numel() * dtype.itemsize
        if group and size + nbytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += nbytes
    if group:
        yield group
