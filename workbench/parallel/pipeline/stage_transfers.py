"""P2P send/recv between pipeline stages, and the sum of a tied weight's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis
from workbench.plan.stage_replicas import overlaps
from workbench.runtime_facts.bucket_packing import shard_parts


@dataclass(frozen=True)
class Transfer:
    """The sends or receives of one tensor, to or from every rank that has a part of it."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self.works)


def start_send(x: Tensor, peer: int, axis: MeshAxis) -> Transfer:
    """Start to send `x` to `peer`, an index on `axis`; the handle to wait for.

    `x` [B, T, D] are this rank's tokens of a microbatch; where the replicas of a stage share it,
    each rank of `peer` gets those that it has too (split and concatenate, 2007.01045).
    """
    return _start(dist.isend, x, peer, axis)


def start_recv(x: Tensor, peer: int, axis: MeshAxis) -> Transfer:
    """Start to receive into `x` from `peer`, an index on `axis`; the handle to wait for."""
    return _start(dist.irecv, x, peer, axis)


def _start(call: Callable[..., Any], x: Tensor, peer: int, axis: MeshAxis) -> Transfer:
    """One transfer as a batch of its own: NCCL then uses the group's communicator, where a bare
    `isend` would open one for the pair; and no transfer needs another of its batch to progress.
    """
    group = axis.pair_groups.get(peer, axis.group)
    ops = [dist.P2POp(call, part, rank, group) for rank, part in _shared(x, peer, axis)]
    return Transfer(dist.batch_isend_irecv(ops))


def _shared(x: Tensor, peer: int, axis: MeshAxis) -> list[tuple[int, Tensor]]:
    """(global rank, the tokens of `x` that it has too) for each rank of `peer` that has any."""
    if not axis.replicas:
        return [(axis.ranks[peer], x)]
    peers, tokens = axis.replicas[peer], x.view(-1, x.shape[-1])
    return [
        (peers[i].rank, tokens[start:stop])
        for i, (start, stop) in overlaps(axis.own_replica.tokens, [one.tokens for one in peers])
    ]


def sum_tied_gradient(
    gradient: Tensor,
    axis: MeshAxis,
    ends: tuple[Sequence[int], Sequence[int]],
    sharded_numel: int | None = None,
) -> None:
    """Add the gradient of a tied weight that the other end of the pipeline has to this rank's, in
    place.

    The first and the last stage each hold a copy of the weight (embedding and head). Both add the
    same two terms, so that the copies stay equal.

    Args:
        gradient: This rank's, or its shard.
        axis: One that has the ranks of both stages.
        ends: Indices on `axis` of the ranks of this rank's stage that hold what it holds, and of
            those of the other stage.
        sharded_numel: Elements of the unsharded gradient, where the ranks of a stage shard it.
    """
    theirs = torch.empty_like(gradient)
    _exchange_between_replicas(gradient.view(-1), theirs.view(-1), axis, ends, sharded_numel)
    gradient.add_(theirs)


def _exchange_between_replicas(
    own: Tensor,
    theirs: Tensor,
    axis: MeshAxis,
    ends: tuple[Sequence[int], Sequence[int]],
    sharded_numel: int | None,
) -> None:
    """Send `own` and fill `theirs`: shards by what they share; of whole gradients, which all
    replicas of a stage have, each gets that of one replica.
    """
    replicas, peers = ends
    place, size = list(replicas).index(axis.index), len(replicas)
    if sharded_numel is None:
        sends = [(peer, own) for at, peer in enumerate(peers) if at % size == place]
        receives = [(peers[place % len(peers)], theirs)]
    else:
        mine, others = (shard_parts(sharded_numel, ranks) for ranks in (size, len(peers)))
        found = overlaps(mine[place], others)
        sends = [(peers[i], own[start:stop]) for i, (start, stop) in found]
        receives = [(peers[i], theirs[start:stop]) for i, (start, stop) in found]
    group = axis.pair_groups.get(peers[0], axis.group)
    ops = [dist.P2POp(dist.isend, x, axis.ranks[peer], group) for peer, x in sends]
    ops += [dist.P2POp(dist.irecv, x, axis.ranks[peer], group) for peer, x in receives]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
