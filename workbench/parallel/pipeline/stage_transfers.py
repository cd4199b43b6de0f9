"""Transfers between neighbouring stages, and the sum of a tied weight's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis


def post(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: MeshAxis
) -> list[dist.Work]:
    """Begin all transfers at once; each is (tensor, index of the peer on the pipeline axis).

    One batch, so that NCCL can neither deadlock on opposite directions nor open a communicator a
    pair.
    """
    ops = [dist.P2POp(dist.isend, x, group=axis.group, group_peer=peer) for x, peer in sends]
    ops += [dist.P2POp(dist.irecv, x, group=axis.group, group_peer=peer) for x, peer in receives]
    return dist.batch_isend_irecv(ops) if ops else []


def sum_tied(gradient: Tensor, axis: MeshAxis, peer: int) -> None:
    """Add the gradient of the other copy, on `peer`, of a weight that the first and the last stage
    share, in place.
    """
    theirs = torch.empty_like(gradient)
    for work in post([(gradient, peer)], [(theirs, peer)], axis):
        work.wait()
    gradient.add_(theirs)
