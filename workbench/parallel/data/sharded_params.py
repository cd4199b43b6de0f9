"""Parameters of a flat bucket: replicated (ZeRO-0 to 2), or sharded and all-gathered (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.parallel.async_collectives import WaitFn
from workbench.parallel.data.data_collectives import local_shard, start_all_gather
from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.parallel.data.storage_resize import resize_storage
from workbench.parallel.data.zero_offload import offloaded_copy

InitParam = Callable[[str], Tensor]
"""Local parameter name -> its initial value, on the rank's device."""


def _init_flat(
    layout: BucketLayout, init_param: InitParam
) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """A flat bucket with its initial values, and the parameters that are views into it.

    It is filled parameter by parameter, so that only one is ever held twice.
    """
    flat: Tensor | None = None
    for name, start, stop in layout.spans():
        value = init_param(name)
        if flat is None:
            flat = torch.zeros(layout.numel, dtype=value.dtype, device=value.device)
        flat[start:stop] = value.flatten()
    assert flat is not None, layout
    return flat, {name: nn.Parameter(view) for name, view in layout.views(flat).items()}


class ReplicatedParams:
    """Parameters that every rank holds unsharded (ZeRO-0, ZeRO-1 and ZeRO-2).

    The optimizer of a rank steps its `shard` of the flat buffer in place; an all-gather after the
    step brings the shards that the other ranks have stepped.
    """

    on_host = False

    def __init__(self, layout: BucketLayout, init_param: InitParam) -> None:
        self.layout = layout
        self.flat, self.parameters = _init_flat(layout, init_param)
        self.flat = self.flat.data
        self.shard = local_shard(self.flat, layout.shard_axis)
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

    def __init__(self, layout: BucketLayout, init_param: InitParam, on_host: bool) -> None:
        self.layout, self.on_host = layout, on_host
        flat, self.parameters = _init_flat(layout, init_param)
        # An alias with a version counter of its own: to autograd, refilling the buffer with the
        # same values must not look like an in-place change of saved tensors.
        self.flat = flat.data
        shard = local_shard(self.flat, layout.shard_axis)
        self.shard = offloaded_copy(shard) if on_host else shard.clone()
        self.unsharded_bytes = self.flat.nbytes
        self._wait: WaitFn | None = None
        self.is_unsharded = True
        self.reshard()

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
        shard, axis = self.shard, self.layout.shard_axis
        # An all-gather reads its input on the device; a single rank has none, and only copies.
        if self.on_host or axis.size == 1:
            shard = local_shard(self.flat, axis)
            shard.copy_(self.shard, non_blocking=True)
        self._wait = start_all_gather(self.flat, shard, axis)

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
