"""A rank's parameters and gradients as data parallelism keeps them: what the optimizer steps, and how it is shared.

Gradients are summed, not averaged: the loss is already divided by the step's global number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from workbench.parallel.data.buckets import Bucket, add_narrow, grouped
from workbench.parallel.data.collectives import start_sum
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis

Sums = Mapping[str, tuple[MeshAxis, ...]]
"""Local name -> the axes over which a parameter's gradient is summed, in that order."""


class Store:
    """All gradients of a rank, accumulated over microbatches and reduced once a step (ZeRO-0).

    `values`, `gradients` and `layouts`, by local name, are what the optimizer steps, what it steps by, and where that
    lies. Where a parameter has the gradients' dtype its `.grad` is the view itself, and autograd adds in place;
    otherwise the 16-bit gradient is added to the view and dropped. Buckets follow the order in which backward finishes.
    """

    def __init__(
        self,
        stages: Mapping[int, dict[str, nn.Parameter]],
        layouts: dict[str, Layout],
        sums: Sums,
        dtype: torch.dtype,
        bucket_bytes: float,
        overlap: bool,
    ) -> None:
        self.overlap = overlap
        self.values: dict[str, Tensor] = {n: p.detach() for own in stages.values() for n, p in own.items()}
        self.layouts = layouts
        self.gradients: dict[str, Tensor] = {}
        self.buckets: dict[int, list[Bucket]] = {
            stage: [Bucket(group, dtype, sums[group[0][0]]) for group in grouped(own, sums, dtype, bucket_bytes)]
            for stage, own in stages.items()
        }
        self._reducing: set[int] = set()
        self._places: dict[nn.Parameter, tuple[int, Bucket, Tensor]] = {}
        for stage, bucket in ((stage, bucket) for stage, own in self.buckets.items() for bucket in own):
            self.gradients.update(bucket.views)
            for name, view in bucket.views.items():
                parameter = stages[stage][name]
                parameter.grad = view if parameter.dtype == dtype else None
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, stage, bucket, view))
                self._places[parameter] = stage, bucket, view

    def start(self) -> None:
        """Start a step with gradients of zero."""
        for own in self.buckets.values():
            for bucket in own:
                bucket.flat.zero_()

    def expect_last(self, stage: int) -> None:
        """The next backward of `stage` is its last: with `overlap`, a bucket is summed as soon as it is complete."""
        if self.overlap:
            self._reducing.add(stage)
        for bucket in self.buckets[stage]:
            bucket.pending = len(bucket.views)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a gradient of one of the rank's parameters that autograd did not accumulate."""
        stage, bucket, view = self._places[parameter]
        if gradient.dtype == view.dtype:
            view.add_(gradient)
        else:
            add_narrow(view, gradient)
        self._count(stage, bucket)

    def reduce(self, stage: int) -> None:
        """Sum whatever of `stage` is not being summed yet, and wait for all."""
        for bucket in self.buckets[stage]:
            if bucket.work is None:
                bucket.work = start_sum(bucket.flat, bucket.sums)
        for bucket in self.buckets[stage]:
            for work in bucket.work or ():
                work.wait()
            bucket.work = None
        self._reducing.discard(stage)

    def publish(self) -> None:
        """After the optimizer's step: give every rank the values that others have stepped."""

    def lasting(self) -> dict[str, list[Tensor]]:
        """What lives from step to step, by category of the memory vocabulary."""
        flats = [bucket.flat for own in self.buckets.values() for bucket in own]
        return {"parameters": list(self.values.values()), "gradients": flats}

    def _arrived(self, stage: int, bucket: Bucket, view: Tensor, parameter: nn.Parameter) -> None:
        if parameter.grad is not view:
            assert parameter.grad is not None
            add_narrow(view, parameter.grad)
            parameter.grad = None
        self._count(stage, bucket)

    def _count(self, stage: int, bucket: Bucket) -> None:
        bucket.pending -= 1
        if stage in self._reducing and bucket.pending == 0:
            bucket.work = start_sum(bucket.flat, bucket.sums)
