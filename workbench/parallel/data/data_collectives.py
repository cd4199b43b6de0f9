"""The collectives of data parallelism."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from workbench.parallel.async_collectives import (
    Finish,
    begin,
    begin_all_gather,
    begin_reduce_scatter,
)
from workbench.parallel.mesh import MeshAxis


def piece(flat: Tensor, axis: MeshAxis) -> Tensor:
    """This rank's of the axis' equal pieces of `flat`."""
    size = flat.numel() // axis.size
    return flat[axis.index * size :][:size]


def start_sum(flat: Tensor, axis: MeshAxis) -> Finish | None:
    """Begin summing `flat` in place over the axis; call what is returned."""
    return begin(partial(dist.all_reduce, group=axis.group), flat) if axis.size > 1 else None


def start_scatter(flat: Tensor, axis: MeshAxis) -> Finish | None:
    """Begin summing this rank's piece of `flat` in place; the other pieces are spent."""
    return begin_reduce_scatter(piece(flat, axis), flat, axis) if axis.size > 1 else None


def start_gather(flat: Tensor, own: Tensor, axis: MeshAxis) -> Finish | None:
    """Begin filling `flat` with the pieces of all ranks; `own` is this one's. Alone, a rank has it
    in place already.
    """
    return begin_all_gather(flat, own, axis) if axis.size > 1 else None
