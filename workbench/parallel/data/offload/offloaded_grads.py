"""Gradients that leave the device as they are made (ZeRO-Offload, 2101.06840, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.copy_stream import CopyStream
from workbench.parallel.async_collectives import WaitFn
from workbench.parallel.data.data_collectives import (
    local_shard,
    start_all_reduce,
    start_reduce_scatter,
)
from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.parallel.data.gradient_reduction import CollectiveChain, ShardedGrads
from workbench.parallel.data.offload.host_arena import host_zeros


class OffloadedGrads(ShardedGrads):
    """Sharded gradients of which no shard stays on the device: `shard` is in host memory.

    A microbatch's reduced shard is copied to the host while backward goes on. Later microbatches
    bring what the host has, add to it on the device, and copy the sum down again. In the last one
    the shard is final before it leaves, so that the device computes its norm.

    Args:
        layout: Of the bucket; nothing is summed over `partial_axes`.
        dtype: Of the gradients.
        device: The rank's.
        copies: The stream of copies.
        before_leaving: Called with a shard that is final, while it is on the device.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        copies: CopyStream,
        before_leaving: Callable[[BucketLayout, Tensor], None],
    ) -> None:
        assert not layout.partial_axes
        self._copies, self._before_leaving = copies, before_leaving
        self._on_host = False
        """Whether the host has gradients of this step."""
        super().__init__(layout, dtype, device)

    def _zero_shard(self, numel: int) -> Tensor:
        return host_zeros(numel, self.dtype, self.device)

    @property
    def persistent(self) -> Tensor | None:
        """Nothing on the device lives from step to step."""
        return None

    def zero(self) -> None:
        """Forget the gradients of the last step; what is copied first overwrites them."""
        self._on_host = False

    def reduction(self, last_microbatch: bool) -> CollectiveChain:
        """Reduce-scatter this microbatch's gradients, add what the host has, and copy the sum to
        the host; in the last microbatch all-reduce it over the shard's replicas before.
        """
        unsharded = self._take_unsharded()
        if unsharded is None and not last_microbatch:
            return
        former = self._start_copy_from_host()
        if unsharded is not None:
            yield start_reduce_scatter(unsharded, self.layout.shard_axis)
        leaving = self._sum(former, unsharded)
        del former, unsharded
        if last_microbatch:
            yield start_all_reduce(leaving, self.layout.replicate_axis)
            self._before_leaving(self.layout, leaving)
        yield self._start_copy_to_host(leaving)

    def _start_copy_from_host(self) -> tuple[Tensor, WaitFn] | None:
        """(the gradients of former microbatches, the wait for them); None if there are none."""
        if not self._on_host:
            return None
        former = torch.empty_like(self.shard, device=self.device)
        with self._copies.copying():
            former.copy_(self.shard, non_blocking=True)
            return former, self._copies.copied()

    def _sum(self, former: tuple[Tensor, WaitFn] | None, unsharded: Tensor | None) -> Tensor:
        """The shard of all microbatches so far, in a tensor that holds no more than it."""
        own = None if unsharded is None else local_shard(unsharded, self.layout.shard_axis)
        if former is None:
            if own is None:
                return torch.zeros_like(self.shard, device=self.device)
            return own if self.layout.shard_axis.size == 1 else own.clone()
        total, wait = former
        wait()
        return total if own is None else total.add_(own)

    def _start_copy_to_host(self, leaving: Tensor) -> WaitFn:
        self._on_host = True
        with self._copies.copying():
            self.shard.copy_(leaving, non_blocking=True)
            return self._copies.copied()
