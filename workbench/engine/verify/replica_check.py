"""Detection of silent divergence between replicas, which must be equal to the bit.

A step does not reveal it: data-parallel gradients are summed whatever weights they come from, and
what an operator strategy replicates, each rank updates by itself. A checkpoint keeps one replica of
each tensor, so before it is written the replicas' bit sums are compared. Each tensor is read once,
and 16 bytes per tensor are all-reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a dtype's size in bytes."""
CHUNK_ENTRIES = 2**22
"""Entries summed at once, and copied first where they do not start at a multiple of eight bytes."""
REPLICA_AXES = ("replicas", "replicate", "expert_replicas", "expert_replicate")
"""Axes of the mesh along which parameters are replicated and gradients summed."""


class ReplicasDiffer(RuntimeError):
    """Replicas differ: unlike a checkpoint that cannot be written, this must end the training.

    Args:
        message: Which tensor, on which ranks.
        blamed: The rank that differs from most; None where most do not agree.
    """

    def __init__(self, message: str, blamed: int | None) -> None:
        super().__init__(message)
        self.blamed = blamed


def check_replicas(
    tensors: Mapping[str, Tensor], axis: MeshAxis, device: torch.device, step: int
) -> None:
    """Check that tensors are equal along an axis. Called by all its ranks.

    Args:
        tensors: Name -> tensor; the same names in the same order on every rank.
        axis: The mesh axis along which they are replicated.
        device: Where the axis' group takes tensors.
        step: Steps done, for the message.

    Raises:
        ReplicasDiffer: On every rank of the axis; names the first tensor that differs.
    """
    if axis.group is None or not tensors:
        return
    sums = torch.stack([bit_checksum(tensor).to(device) for tensor in tensors.values()])
    # max(~x) is ~min(x): one all-reduce finds both extremes, and equal extremes mean equal sums.
    both = torch.cat((sums, ~sums))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=axis.group)
    highest, lowest = both[: len(sums)], ~both[len(sums) :]
    if bool((highest == lowest).all()):
        return
    parts = [torch.empty_like(sums) for _ in axis.ranks]
    dist.all_gather(parts, sums, group=axis.group)
    place = int((highest != lowest).nonzero()[0])
    raise _difference(list(tensors)[place], [int(part[place]) for part in parts], axis, step)


def bit_checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits read as integers, modulo 2^64: an int64 scalar.

    One flipped bit always changes it.
    """
    flat = tensor.detach().contiguous().flatten()
    return torch.stack([_sum(piece) for piece in flat.split(CHUNK_ENTRIES)]).sum()


def _sum(piece: Tensor) -> Tensor:
    """Sum of a flat piece, eight bytes at a time; the rest as narrower integers."""
    each = 8 // piece.element_size()
    whole = piece.numel() // each * each
    aligned = piece if piece.storage_offset() % each == 0 else piece.clone()
    rest = aligned[whole:].view(INTEGER_OF_BYTES[piece.element_size()]).sum(dtype=torch.int64)
    return aligned[:whole].view(torch.int64).sum() + rest


def _difference(name: str, sums: list[int], axis: MeshAxis, step: int) -> ReplicasDiffer:
    """Which ranks differ from most of them, where most agree."""
    usual = max(set(sums), key=sums.count)
    odd = [rank for rank, found in zip(axis.ranks, sums) if found != usual]
    who = f"on rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} from that of the others"
    most = 2 * sums.count(usual) > len(sums)
    if not most:
        who = f"among ranks {', '.join(map(str, axis.ranks))}"
    return ReplicasDiffer(
        f"after {step} steps {name} differs {who}, and replicas must be equal to the bit: memory "
        "was corrupted, or the replicas have diverged; this state is not saved, resume from an "
        "earlier checkpoint",
        min(odd) if most else None,
    )
