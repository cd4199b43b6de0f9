"""P2P send/recv between pipeline stages, and the sum of a tied weight's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis


def batched_send_recv(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> list[dist.Work]:
    """Start all sends and receives as one batch; each is (tensor, peer's index on `axis`).

    One batch, so that NCCL can neither deadlock on opposite directions nor open a communicator for
    every pair of ranks.

    Returns:
        Handles to wait for: one for each transfer, sends first, or a single one for the batch,
        depending on the backend.
    """
    ops = [dist.P2POp(dist.isend, x, group=axis.group, group_peer=peer) for x, peer in sends]
    ops += [dist.P2POp(dist.irecv, x, group=axis.group, group_peer=peer) for x, peer in receives]
    return dist.batch_isend_irecv(ops) if ops else []


def sum_tied_gradient(gradient: Tensor, axis: MeshAxis, peer: int) -> None:
    """Add `peer`'s gradient of a tied weight to this rank's, in place.

    The first and the last stage each hold a copy of the weight (embedding and head). Both add the
    same two terms, so that the copies stay equal.
    """
    theirs = torch.empty_like(gradient)
    for work in batched_send_recv([(gradient, peer)], [(theirs, peer)], axis):
        work.wait()
    gradient.add_(theirs)
