"""The collectives of context parallelism: a ring that passes keys and values on; heads exchanged
for tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import run_collective
from workbench.parallel.mesh import MeshAxis


class Passing(NamedTuple):
    """Tensors on their way round the ring."""

    arriving: list[Tensor]
    leaving: list[Tensor]
    works: list[dist.Work]


def pass_on(tensors: list[Tensor], axis: MeshAxis) -> Passing:
    """Begin sending `tensors` to the next rank of the ring, and receiving what the former sends, in
    one batch.
    """
    behind, ahead = (axis.index - 1) % axis.size, (axis.index + 1) % axis.size
    arriving = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x, group=axis.group, group_peer=ahead) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, group=axis.group, group_peer=behind) for x in arriving]
    return Passing(arriving, tensors, dist.batch_isend_irecv(ops))


def arrived(passing: Passing) -> list[Tensor]:
    """What the former rank sent, when it is there and what was sent has left."""
    for work in passing.works:
        work.wait()
    return passing.arriving


def exchange(x_RN: Tensor, axis: MeshAxis) -> Tensor:
    """Row r goes to rank r; row r of the result came from rank r."""
    received_RN = torch.empty_like(x_RN)
    run_collective(partial(dist.all_to_all_single, group=axis.group), received_RN, x_RN)
    return received_RN
