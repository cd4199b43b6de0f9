"""P2P send/recv between pipeline stages, and the sum of a tied weight's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis, exchange


def start_send(x: Tensor, peer: int, axis: MeshAxis) -> dist.Work:
    """Start to send `x` to `peer`, an index on `axis`; the handle to wait for."""
    return _start(dist.isend, x, peer, axis)


def start_recv(x: Tensor, peer: int, axis: MeshAxis) -> dist.Work:
    """Start to receive into `x` from `peer`, an index on `axis`; the handle to wait for."""
    return _start(dist.irecv, x, peer, axis)


def _start(call: Callable[..., Any], x: Tensor, peer: int, axis: MeshAxis) -> dist.Work:
    """One transfer as a batch of its own: NCCL then uses the group's communicator, where a bare
    `isend` would open one for the pair; and no transfer needs another of its batch to progress.
    """
    group = axis.pair_groups.get(peer, axis.group)
    (work,) = dist.batch_isend_irecv([dist.P2POp(call, x, axis.ranks[peer], group)])
    return work


def sum_tied_gradient(gradient: Tensor, axis: MeshAxis, peer: int) -> None:
    """Add `peer`'s gradient of a tied weight to this rank's, in place.

    The first and the last stage each hold a copy of the weight (embedding and head). Both add the
    same two terms, so that the copies stay equal.
    """
    theirs = torch.empty_like(gradient)
    exchange(gradient, theirs, axis.ranks[peer], axis.pair_groups.get(peer, axis.group))
    gradient.add_(theirs)
