"""Host copies of a rank's shards, which are written while training continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workbench.checkpoint.checkpoint_format import Shard
from workbench.copy_stream import CopyStream


def start_copy_to_host(
    shards: Sequence[Shard], copies: CopyStream, former: Sequence[Shard] = ()
) -> list[Shard]:
    """Start to copy shards to host memory.

    Copies of CUDA tensors are in pinned memory, and complete once `copies` is. Copies of CPU
    tensors are complete at once; they are allocated by numpy, outside of torch's allocator, whose
    count is the training's own memory.

    Args:
        shards: The shards to copy.
        copies: The stream that copies.
        former: Earlier copies of the same shards, which are overwritten: allocating costs more than
            copying.

    Returns:
        The shards, with copied tensors.
    """
    known = [(copy.tensor.shape, copy.tensor.dtype) for copy in former]
    again = known == [(shard.tensor.shape, shard.tensor.dtype) for shard in shards]
    buffers = (
        [copy.tensor for copy in former] if again else [_host_buffer(s.tensor) for s in shards]
    )
    with copies.copying():
        return [
            replace(shard, tensor=into.copy_(shard.tensor.detach(), non_blocking=True))
            for shard, into in zip(shards, buffers)
        ]


def _host_buffer(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return (
        torch.from_numpy(np.empty(tensor.nbytes, dtype=np.uint8))
        .view(tensor.dtype)
        .view(tensor.shape)
    )
