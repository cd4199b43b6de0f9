"""Collectives of context parallelism: send/recv around the ring, and Ulysses' all-to-all."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import run_collective
from workbench.parallel.mesh import MeshAxis


class RingTransfer(NamedTuple):
    """A send/recv around the ring in flight; both sides are held until it is waited for."""

    received: list[Tensor]
    sent: list[Tensor]
    works: list[dist.Work]


def start_ring_transfer(tensors: list[Tensor], axis: MeshAxis) -> RingTransfer:
    """Start sending `tensors` to the next rank of the ring and receiving from the previous one.

    All are one batch, so that neither direction waits for the other.
    """
    previous, following = (axis.index - 1) % axis.size, (axis.index + 1) % axis.size
    received = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x, group=axis.group, group_peer=following) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, group=axis.group, group_peer=previous) for x in received]
    return RingTransfer(received, tensors, dist.batch_isend_irecv(ops))


def wait_ring_transfer(transfer: RingTransfer) -> list[Tensor]:
    """Wait for both directions; the previous rank's tensors."""
    for work in transfer.works:
        work.wait()
    return transfer.received


def all_to_all_equal(x_RN: Tensor, axis: MeshAxis) -> Tensor:
    """All-to-all of equal rows: row r is sent to rank r; row r of the result came from rank r."""
    received_RN = torch.empty_like(x_RN)
    run_collective(partial(dist.all_to_all_single, group=axis.group), received_RN, x_RN)
    return received_RN
