"""Asynchronous collectives of data parallelism: all-reduce, reduce-scatter and all-gather.

They work on flat buckets, whose length is a multiple of the shard group's size.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import (
    WaitFn,
    all_gather_async,
    reduce_scatter_async,
    start_collective,
)
from workbench.parallel.mesh import MeshAxis


def local_shard(flat: Tensor, axis: MeshAxis) -> Tensor:
    """This rank's of `axis.size` equal shards of `flat`, as a view."""
    size = flat.numel() // axis.size
    return flat[axis.index * size :][:size]


def start_all_reduce(flat: Tensor, axis: MeshAxis) -> WaitFn | None:
    """Start summing `flat` in place over `axis`; None when the axis has one rank."""
    if axis.size == 1:
        return None
    return start_collective(partial(dist.all_reduce, group=axis.group), flat)


def start_reduce_scatter(flat: Tensor, axis: MeshAxis) -> WaitFn | None:
    """Start summing this rank's shard of `flat` in place; the other shards are overwritten."""
    return reduce_scatter_async(local_shard(flat, axis), flat, axis) if axis.size > 1 else None


def start_all_gather(flat: Tensor, shard: Tensor, axis: MeshAxis) -> WaitFn | None:
    """Start filling `flat` with the shards of all ranks, of which `shard` is this rank's.

    A rank that is alone on the axis must have its shard in place already.
    """
    return all_gather_async(flat, shard, axis) if axis.size > 1 else None
