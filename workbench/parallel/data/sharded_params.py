"""Parameters of a flat bucket: replicated (ZeRO-0 to 2), or sharded and all-gathered (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.copy_stream import CopyStream
from workbench.parallel.async_collectives import WaitFn
from workbench.parallel.data.data_collectives import local_shard, start_all_gather
from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.parallel.data.storage_resize import (
    resize_storage,
    view_without_storage,
    without_storage,
)
from workbench.parallel.layout import Layout


@dataclass(frozen=True)
class ParamInit:
    """Where parameters live, and what they start from.

    Attributes:
        device: The rank's.
        dtype: Of parameters, but of a bucket that has a dtype of its own.
        fill: Fills a local tensor of zeros, given its local name and its layout; None where a
            checkpoint fills parameters before they are used.
        copies: The stream of copies from and to host memory (offload).
        master: Whether an optimizer in host memory steps fp32 copies of them.
        delayed: Whether it steps by the last step's gradients while the next are computed.
    """

    device: torch.device
    dtype: torch.dtype
    fill: Callable[[str, Layout, Tensor], None] | None
    copies: CopyStream
    master: bool = False
    delayed: bool = False


def _init_shard(
    shard: Tensor, bucket: BucketLayout, layouts: Mapping[str, Layout], init: ParamInit
) -> None:
    """Fill this rank's shard of a bucket, and nothing that other ranks hold."""
    if init.fill is None or bucket.dtype is not None:  # bytes are quantized from what is drawn
        return
    of_shard = bucket.shard_layouts(layouts)
    for name, local in bucket.shard_views(shard).items():
        init.fill(name, of_shard[name], local)


class ReplicatedParams:
    """Parameters that every rank holds unsharded (ZeRO-0, ZeRO-1 and ZeRO-2).

    A rank initializes its `shard` of the flat buffer, and its optimizer steps it in place; an
    all-gather brings the shards of the other ranks.
    """

    on_host = False

    def __init__(
        self, layout: BucketLayout, layouts: Mapping[str, Layout], init: ParamInit
    ) -> None:
        self.layout = layout
        dtype = layout.dtype or init.dtype
        flat = torch.zeros(layout.numel, dtype=dtype, device=init.device)
        floats = dtype.is_floating_point  # bytes can have no gradient
        self.parameters = {
            name: nn.Parameter(view, floats) for name, view in layout.views(flat).items()
        }
        self.flat = flat.data
        self.shard = local_shard(self.flat, layout.shard_axis)
        _init_shard(self.shard, layout, layouts, init)
        self._wait: WaitFn | None = None

    @property
    def persistent(self) -> Tensor:
        """The buffer that lives from step to step."""
        return self.flat

    def start_all_gather(self) -> None:
        """Start the all-gather of the updated shards."""
        self._wait = start_all_gather(self.flat, self.shard, self.layout.shard_axis)

    def wait_all_gather(self) -> None:
        """Wait until all updated shards have arrived."""
        if self._wait is not None:
            self._wait()
            self._wait = None


class ShardedParams:
    """Parameters of which a rank keeps a shard (ZeRO-3, FSDP; Zhao et al. 2023, arXiv 2304.11277).

    They are views into one flat buffer, whose storage is allocated by `unshard` and freed by
    `reshard`. The same buffer is refilled each time, so that the views that autograd has saved in
    forward are valid again in backward.
    """

    def __init__(
        self, layout: BucketLayout, layouts: Mapping[str, Layout], init: ParamInit, on_host: bool
    ) -> None:
        self.layout, self.on_host = layout, on_host
        dtype = layout.dtype or init.dtype
        flat = without_storage(layout.numel, dtype, init.device)
        floats = dtype.is_floating_point
        self.parameters = {
            name: nn.Parameter(view_without_storage(flat, start, layout.shapes[name]), floats)
            for name, start, _ in layout.spans()
        }
        # An alias with a version counter of its own: to autograd, refilling the buffer with the
        # same values must not look like an in-place change of saved tensors.
        self.flat = flat.data
        resize_storage(self.flat, 0)  # fake tensors may have allocated it for the views
        length = layout.numel // layout.shard_axis.size
        self.shard = (
            host_zeros(length, dtype, init.device)
            if on_host
            else torch.zeros(length, dtype=dtype, device=init.device)
        )
        _init_shard(self.shard, layout, layouts, init)
        self.unsharded_bytes = self.flat.nbytes
        self._copies = init.copies
        self._wait: WaitFn | None = None
        self.is_unsharded = False

    @property
    def persistent(self) -> Tensor:
        """The buffer that lives from step to step."""
        return self.shard

    def start_unshard(self) -> None:
        """Allocate the flat buffer and start its all-gather, unless it is unsharded already."""
        if self.is_unsharded:
            return
        self.is_unsharded = True
        resize_storage(self.flat, self.unsharded_bytes)
        axis = self.layout.shard_axis
        if not self.on_host and axis.size > 1:
            self._wait = start_all_gather(self.flat, self.shard, axis)
            return
        # An all-gather reads its input on the device; a single rank has none, and only copies.
        with self._copies.copying():
            shard = local_shard(self.flat, axis)
            shard.copy_(self.shard, non_blocking=True)
            self._wait = start_all_gather(self.flat, shard, axis) or self._copies.copied()

    def unshard(self) -> None:
        """All-gather the parameters and wait for them."""
        self.start_unshard()
        if self._wait is not None:
            self._wait()
            self._wait = None

    def reshard(self) -> None:
        """Free the unsharded parameters; this rank's shard stays."""
        if self.is_unsharded:
            self.unshard()  # an all-gather still under way would write into freed storage
            self.is_unsharded = False
            resize_storage(self.flat, 0)
