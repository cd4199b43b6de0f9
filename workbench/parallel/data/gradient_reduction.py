"""Gradients of a flat bucket: accumulated unsharded and reduced once a step, or reduce-scattered.

Gradients are summed, not averaged: the loss is already divided by the step's global number of
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.models.gemm_into import multiply_into
from workbench.parallel.async_collectives import WaitFn
from workbench.parallel.data.data_collectives import (
    local_shard,
    start_all_reduce,
    start_reduce_scatter,
)
from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.planned_device import is_gpu, on_gpu
from workbench.runtime_facts.cast_sizes import GRADIENT_CAST_NUMEL

CollectiveChain = Iterator[WaitFn | None]
"""Collectives that depend on each other: asking for the next one, after waiting for the last,
starts it.
"""


def accumulate_upcast(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a total of a wider dtype.

    CUDA widens in registers. On CPU it is cast chunk by chunk: a copy of all of it in the wider
    dtype would be live beside it.
    """
    if on_gpu(total):
        total.add_(gradient)
        return
    chunks = zip(
        total.flatten().split(GRADIENT_CAST_NUMEL), gradient.flatten().split(GRADIENT_CAST_NUMEL)
    )
    for total_chunk, gradient_chunk in chunks:
        total_chunk.add_(gradient_chunk.to(total_chunk.dtype))


class AccumulatedGrads:
    """Unsharded gradients of a bucket, accumulated over microbatches and reduced once a step.

    Used by ZeRO-0 and ZeRO-1, and by ZeRO-2 and ZeRO-3 with `data.reduce: step` and several
    microbatches.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.views = layout.views(self.flat)
        self.shard = local_shard(self.flat, layout.shard_axis)

    @property
    def persistent(self) -> Tensor:
        """The buffer that lives from step to step."""
        return self.flat

    def zero(self) -> None:
        """Zero the gradients at the start of a step."""
        self.flat.zero_()

    def grad_view(self, name: str) -> Tensor | None:
        """The view that autograd may accumulate into as `parameter.grad`."""
        return self.views[name]

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter."""
        view = self.views[name]
        if view.dtype == gradient.dtype:
            view.add_(gradient)
        else:
            accumulate_upcast(view, gradient)

    def accumulate_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add a microbatch's gradient a b of a weight."""
        view = self.views[name]
        if view.dtype == a.dtype or on_gpu(view):
            multiply_into(view, a, b, first=False)
        else:  # the GEMM in the operands' dtype is the faster one
            self.accumulate(name, a @ b)

    @property
    def is_chained(self) -> bool:
        """Whether the reduction is more than one collective: hybrid sharding."""
        return self.layout.shard_axis.size > 1 and self.layout.replicate_axis.size > 1

    def should_reduce(self, last_microbatch: bool) -> bool:
        """Whether gradients are reduced after this microbatch."""
        return last_microbatch

    def reduction(self, last_microbatch: bool) -> CollectiveChain:
        """Reduce-scatter in the shard group, then all-reduce the shard over its replicas.

        In place: this rank's shard of the flat buffer is correct afterwards, and only that.
        """
        yield start_reduce_scatter(self.flat, self.layout.shard_axis)
        yield start_all_reduce(self.shard, self.layout.replicate_axis)


class ShardedGrads:
    """Sharded gradients of a bucket, unsharded only until their reduce-scatter.

    Used by ZeRO-2 and ZeRO-3 with `data.reduce: microbatch`, or one microbatch. The unsharded
    buffer is allocated by a microbatch's first gradient of the bucket, and freed once its
    reduce-scatter has been added to the shard.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        self.shard = self._zero_shard(layout.numel // layout.shard_axis.size)
        self._unsharded: Tensor | None = None
        self._unwritten: dict[str, Tensor] = {}
        """Views into `_unsharded` that hold no gradient yet."""

    def _zero_shard(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    @property
    def persistent(self) -> Tensor | None:
        """The buffer that lives on the device from step to step, if there is one."""
        return self.shard

    def zero(self) -> None:
        """Zero the gradients at the start of a step."""
        self.shard.zero_()

    def grad_view(self, name: str) -> Tensor | None:
        """None: autograd has nothing to accumulate into, since no unsharded buffer persists."""
        return None

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter."""
        view, first = self._unsharded_view(name)
        if first:
            view.copy_(gradient)
        else:
            accumulate_upcast(view, gradient)

    def accumulate_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add a microbatch's gradient a b of a weight."""
        if self.dtype == a.dtype or is_gpu(self.device):
            view, first = self._unsharded_view(name)
            multiply_into(view, a, b, first)
        else:
            self.accumulate(name, a @ b)

    def _unsharded_view(self, name: str) -> tuple[Tensor, bool]:
        """(where a parameter's gradient lies, whether it holds none yet)."""
        if self._unsharded is None:
            # Not zeroed but for its padding: the first gradient of each parameter is copied, and
            # `reduction` zeroes what has none.
            self._unsharded = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
            for gap in self.layout.padding():
                self._unsharded[gap].zero_()
            self._unwritten = self.layout.views(self._unsharded)
        view = self._unwritten.pop(name, None)
        return (self.layout.views(self._unsharded)[name], False) if view is None else (view, True)

    def _take_unsharded(self) -> Tensor | None:
        """This microbatch's gradients, for the caller to free; None if there are none."""
        unsharded, self._unsharded = self._unsharded, None
        for view in self._unwritten.values():
            view.zero_()
        self._unwritten = {}
        return unsharded

    @property
    def is_chained(self) -> bool:
        """Always: what was scattered is added to the shard, and the unsharded buffer freed."""
        return True

    def should_reduce(self, last_microbatch: bool) -> bool:
        """Whether gradients are reduced after this microbatch: after each."""
        return True

    def reduction(self, last_microbatch: bool) -> CollectiveChain:
        """Reduce-scatter this microbatch's gradients and add them to the shard.

        The all-reduce over the shard's replicas (hybrid sharding) is linear, so that once a step,
        after the last microbatch, is enough.
        """
        if (unsharded := self._take_unsharded()) is not None:
            yield start_reduce_scatter(unsharded, self.layout.shard_axis)
            self.shard.add_(local_shard(unsharded, self.layout.shard_axis))
            del unsharded
        if last_microbatch:
            yield start_all_reduce(self.shard, self.layout.replicate_axis)


class PendingReduction:
    """A bucket's reduction under way: a chain of collectives of which one is in flight.

    One that `is_chained` holds its buffers until it is advanced to its end.
    """

    def __init__(self, chain: CollectiveChain, is_chained: bool) -> None:
        self._chain, self.is_chained = chain, is_chained
        self._wait: WaitFn | None = None
        self.done = False
        self.advance()

    def advance(self) -> None:
        """Wait for the collective in flight, and start the next one if there is one."""
        if self._wait is not None:
            self._wait()
        for wait in self._chain:
            if wait is not None:
                self._wait = wait
                return
        self._wait, self.done = None, True
