"""Copies of what a rank saves, in host memory: training goes on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workbench.checkpoint.checkpoint_format import Shard


def copy_to_host(shards: Sequence[Shard], former: Sequence[Shard] = ()) -> list[Shard]:
    """The shards with their values of now, in host memory of their own; returns when they are
    copied.

    `former` copies of the same shards are written over: fresh memory costs more than the copy
    itself. Copies of a CUDA device's tensors are page-locked. Those on the CPU lie outside of
    torch's allocator, whose count is the training's own memory.
    """
    known = [(copy.tensor.shape, copy.tensor.dtype) for copy in former]
    again = known == [(shard.tensor.shape, shard.tensor.dtype) for shard in shards]
    rooms = [copy.tensor for copy in former] if again else [_room(shard.tensor) for shard in shards]
    copies = [
        replace(shard, tensor=room.copy_(shard.tensor.detach(), non_blocking=shard.tensor.is_cuda))
        for shard, room in zip(shards, rooms)
    ]
    if any(shard.tensor.is_cuda for shard in shards):
        torch.cuda.current_stream().synchronize()
    return copies


def _room(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return (
        torch.from_numpy(np.empty(tensor.nbytes, dtype=np.uint8))
        .view(tensor.dtype)
        .view(tensor.shape)
    )
