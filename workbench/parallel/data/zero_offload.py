"""ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840): shards in host memory, stepped by the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.copy_stream import CopyStream

if TYPE_CHECKING:
    from workbench.parallel.data.sharded_params import ReplicatedParams, ShardedParams


def offloaded_copy(x: Tensor) -> Tensor:
    """A copy in host memory; pinned if `x` is on a CUDA device, so that copies can be
    asynchronous.
    """
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def offloaded_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [numel] in host memory; pinned if `device` is a CUDA device."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class _HostBucket(NamedTuple):
    params: ReplicatedParams | ShardedParams
    host_params: Tensor
    """Where the optimizer steps: a host copy, or the shard itself where it lives on the host."""
    grads: Tensor
    host_grads: Tensor


class HostShards:
    """Host copies of this rank's shards of parameters and gradients, for an optimizer on the CPU.

    `values` and `gradients`, by local name, are what the optimizer steps and by which gradients.
    """

    def __init__(
        self, buckets: Sequence[tuple[ReplicatedParams | ShardedParams, Tensor]], copies: CopyStream
    ) -> None:
        self._copies = copies
        self._started: set[int] = set()
        """Ids of gradient shards whose copy to the host is under way."""
        self._buckets = [
            _HostBucket(
                params,
                params.shard if params.on_host else offloaded_copy(params.shard),
                grads,
                offloaded_copy(grads),
            )
            for params, grads in buckets
        ]
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        for bucket in self._buckets:
            self.values |= bucket.params.layout.shard_views(bucket.host_params)
            self.gradients |= bucket.params.layout.shard_views(bucket.host_grads)

    @torch.no_grad()
    def start_copy_to_host(self, grads: Tensor) -> None:
        """Start to copy a shard of gradients that are final to the host."""
        if id(grads) in self._started:
            return
        self._started.add(id(grads))
        bucket = next(bucket for bucket in self._buckets if bucket.grads is grads)
        with self._copies.copying():
            bucket.host_grads.copy_(grads, non_blocking=True)

    def copy_grads_to_host(self) -> None:
        """Copy what is left of the gradients' shards to the host, and wait until all are there."""
        for bucket in self._buckets:
            self.start_copy_to_host(bucket.grads)
        self._copies.synchronize()  # the CPU reads them next
        self._started.clear()

    @torch.no_grad()
    def copy_params_to_device(self, params: ReplicatedParams | ShardedParams) -> None:
        """Copy a bucket's updated shard to the device, unless it lives on the host."""
        bucket = next(bucket for bucket in self._buckets if bucket.params is params)
        if bucket.host_params is not params.shard:
            params.shard.copy_(bucket.host_params, non_blocking=True)

    def persistent(self) -> dict[str, list[Tensor]]:
        """Host buffers that live from step to step, by category of the memory frame."""
        on_host = [b.host_params for b in self._buckets if b.params.on_host]
        copies = [b.host_params for b in self._buckets if not b.params.on_host]
        return {
            "parameters": on_host,
            "communication": [*copies, *(bucket.host_grads for bucket in self._buckets)],
        }
