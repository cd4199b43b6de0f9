"""ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840): optimizer states in host memory, stepped by the
CPU.

Beside moments and fp32 master weights, 12 bytes a parameter, the host holds the shard of gradients,
and no second copy of 16-bit parameters: they are rounded from the master weights on their way to
the device. Parameters of 32 bits have no master weights; what the CPU steps then is a copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from workbench.copy_stream import CopyStream
from workbench.parallel.data.gradient_reduction import AccumulatedGrads, ShardedGrads
from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.parallel.data.offload.host_staging import HostStaging
from workbench.parallel.data.offload.offloaded_grads import OffloadedGrads

if TYPE_CHECKING:
    from workbench.parallel.data.sharded_params import ReplicatedParams, ShardedParams

Grads: TypeAlias = AccumulatedGrads | ShardedGrads


class _HostBucket(NamedTuple):
    params: ReplicatedParams | ShardedParams
    stepped: Tensor
    """What the optimizer steps: master weights, a copy, or the shard where it lives on the host."""
    grads: Grads
    host_grads: Tensor
    """Where they are copied to."""
    stepped_by: Tensor
    """What the optimizer reads: `host_grads`, or a copy of the last step's (delayed update)."""


class HostShards:
    """What the host holds of this rank's shards, for an optimizer on the CPU.

    Attributes, each by local name:
        values: Parameters as a checkpoint has them.
        masters: fp32 copies of 16-bit parameters, which the optimizer steps instead of `values`;
            empty without.
        gradients: What it steps by.
        names: Local names of what each bucket has of these, which differ in number by rank.

    Args:
        buckets: Parameters and gradients of each bucket.
        device: The rank's.
        copies: The stream of copies.
        master: Whether the optimizer steps fp32 copies of 16-bit parameters.
        delayed: Whether it steps by copies of the last step's gradients.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[ReplicatedParams | ShardedParams, Grads]],
        device: torch.device,
        copies: CopyStream,
        master: bool,
        delayed: bool,
    ) -> None:
        self._device, self._copies, self._has_master = device, copies, master
        self._delayed = delayed
        self._started: set[int] = set()
        """Ids of gradients whose copy to the host is under way."""
        all_on_host = all(params.on_host for params, _ in buckets)
        self._staging = None if all_on_host else HostStaging(device, copies)
        self._buckets = [self._bucket(params, grads) for params, grads in buckets]
        self.values: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.names: list[list[str]] = []
        for bucket in self._buckets:
            layout, stepped = bucket.params.layout, bucket.stepped
            self.values |= layout.shard_views(bucket.params.shard if master else stepped)
            self.masters |= layout.shard_views(stepped) if master else {}
            self.gradients |= (own := layout.shard_views(bucket.stepped_by))
            self.names.append(list(own))

    def _bucket(self, params: ReplicatedParams | ShardedParams, grads: Grads) -> _HostBucket:
        host_grads = grads.shard
        if not isinstance(grads, OffloadedGrads):
            host_grads = host_zeros(host_grads.numel(), host_grads.dtype, self._device)
        stepped_by = host_grads
        if self._delayed:
            stepped_by = host_zeros(host_grads.numel(), host_grads.dtype, self._device, False)
        return _HostBucket(params, self._stepped(params), grads, host_grads, stepped_by)

    @torch.no_grad()
    def _stepped(self, params: ReplicatedParams | ShardedParams) -> Tensor:
        shard = params.shard
        if params.on_host and not self._has_master and not self._delayed:
            return shard  # a delayed update would change what is streamed meanwhile
        dtype = torch.float32 if self._has_master else shard.dtype
        stepped = host_zeros(shard.numel(), dtype, self._device, copied=False)
        if params.on_host or self._staging is None:
            return stepped.copy_(shard)
        self._staging.to_host(stepped, shard)
        return stepped

    @torch.no_grad()
    def start_copy_to_host(self, grads: Grads) -> None:
        """Start to copy a shard of gradients that are final, where the host steps by them and has
        them not yet.
        """
        bucket = next((bucket for bucket in self._buckets if bucket.grads is grads), None)
        if bucket is None or isinstance(grads, OffloadedGrads) or id(grads) in self._started:
            return
        self._started.add(id(grads))
        with self._copies.copying():
            bucket.host_grads.copy_(grads.shard, non_blocking=True)

    def copy_grads_to_host(self) -> None:
        """Copy what is left of the gradients' shards to the host, and wait until all are there."""
        for bucket in self._buckets:
            self.start_copy_to_host(bucket.grads)
        self._copies.synchronize()  # the CPU reads them next
        self._started.clear()

    def keep_gradients(self) -> None:
        """Copy gradients that are in host memory to where the optimizer reads them (delayed
        update).
        """
        for bucket in self._buckets:
            bucket.stepped_by.copy_(bucket.host_grads)

    @torch.no_grad()
    def store_params(self, params: ReplicatedParams | ShardedParams) -> None:
        """Bring what the host has stepped into a bucket's shard, rounded to its dtype; where that
        is on the device, on the stream of copies.
        """
        bucket = next((bucket for bucket in self._buckets if bucket.params is params), None)
        if bucket is None or bucket.stepped is params.shard:
            return
        if params.on_host or self._staging is None:
            params.shard.copy_(bucket.stepped)
        else:
            self._staging.to_device(params.shard, bucket.stepped)

    def params_of(self, index: int) -> ReplicatedParams | ShardedParams:
        """The parameters of a bucket, of those that `names` names."""
        return self._buckets[index].params

    def persistent(self) -> dict[str, list[Tensor]]:
        """Host tensors that live from step to step, by category of the memory frame."""
        stepped = [bucket.stepped for bucket in self._buckets]
        return {
            "parameters": [b.params.shard for b in self._buckets if b.params.on_host]
            + ([] if self._has_master else stepped),
            "gradients": [x for b in self._buckets for x in (b.host_grads, b.stepped_by)],
            "communication": [] if self._staging is None else self._staging.buffers,
        }
