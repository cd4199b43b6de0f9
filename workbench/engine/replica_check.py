"""Data-parallel replicas hold the same bits: where they do not, memory was corrupted, or training
has gone apart.

Nothing in a step shows it: gradients are summed whatever weights they come from. Before a
checkpoint is written, which keeps one replica of each tensor, sums of their bits are compared; a
flipped bit changes a sum. The tensors are read once, and a few bytes a tensor are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a dtype's size in bytes."""
PIECE = 2**22
"""Entries that are summed at once, and copied where they do not begin at a multiple of eight bytes.
"""
AXES = ("replicas", "replicate", "expert_replicas", "expert_replicate")
"""Axes of the mesh along which ranks hold the same parameters, and sum their gradients."""


class ReplicasDiffer(RuntimeError):
    """Training cannot go on from replicas that differ, as it can where only a disk refuses a
    checkpoint.
    """


def compare(tensors: Mapping[str, Tensor], axis: MeshAxis, device: torch.device, step: int) -> None:
    """Raise `ReplicasDiffer`, on every rank of `axis`, naming the first of the `tensors` that is
    not equal along it.

    Every rank of the axis calls it with the same names, in the same order; its group takes tensors
    on `device`.
    """
    if axis.group is None or not tensors:
        return
    sums = torch.stack([bit_sum(tensor).to(device) for tensor in tensors.values()])
    both = torch.cat((sums, ~sums))
    dist.all_reduce(both, dist.ReduceOp.MAX, group=axis.group)
    highest, lowest = both[: len(sums)], ~both[len(sums) :]
    if bool((highest == lowest).all()):
        return
    parts = [torch.empty_like(sums) for _ in axis.ranks]
    dist.all_gather(parts, sums, group=axis.group)
    place = int((highest != lowest).nonzero()[0])
    raise ReplicasDiffer(
        _words(list(tensors)[place], [int(part[place]) for part in parts], axis, step)
    )


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits, read as integers, modulo 2^64: one flipped bit always changes it; a
    scalar of int64.
    """
    flat = tensor.detach().contiguous().flatten()
    return torch.stack([_sum(piece) for piece in flat.split(PIECE)]).sum()


def _sum(piece: Tensor) -> Tensor:
    """The same of a flat piece, by eight bytes where there are as many: narrower integers are
    widened first.
    """
    each = 8 // piece.element_size()
    whole = piece.numel() // each * each
    aligned = piece if piece.storage_offset() % each == 0 else piece.clone()
    rest = aligned[whole:].view(WORDS[piece.element_size()]).sum(dtype=torch.int64)
    return aligned[:whole].view(torch.int64).sum() + rest


def _words(name: str, sums: list[int], axis: MeshAxis, step: int) -> str:
    """Which ranks differ from most of them, where most agree."""
    usual = max(set(sums), key=sums.count)
    odd = [rank for rank, found in zip(axis.ranks, sums) if found != usual]
    who = f"on rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} from that of the others"
    if 2 * sums.count(usual) <= len(sums):
        who = f"among ranks {', '.join(map(str, axis.ranks))}"
    return (
        f"after {step} steps {name} differs {who}, and replicas must be equal to the bit: the "
        f"memory of one was "
        "corrupted, or they have gone apart; no checkpoint is written of it, go on from an "
        "earlier one"
    )
