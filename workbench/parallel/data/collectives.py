"""The collectives of data parallelism."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis

_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed both."""


def piece(flat: Tensor, axis: MeshAxis) -> Tensor:
    """This rank's of the axis' equal pieces of `flat`."""
    size = flat.numel() // axis.size
    return flat[axis.index * size :][:size]


def start_sum(flat: Tensor, axis: MeshAxis) -> dist.Work | None:
    """Begin summing `flat` in place over the axis; wait on what is returned."""
    return dist.all_reduce(flat, group=axis.group, async_op=True) if axis.size > 1 else None


def start_scatter(flat: Tensor, axis: MeshAxis) -> dist.Work | None:
    """Begin summing this rank's piece of `flat` in place; the other pieces are spent."""
    work: dist.Work | None = None
    if axis.size > 1:
        work = _scatter(piece(flat, axis), flat, group=axis.group, async_op=True)
    return work


def start_gather(flat: Tensor, own: Tensor, axis: MeshAxis) -> dist.Work | None:
    """Begin filling `flat` with the pieces of all ranks; `own` is this one's. Alone, a rank has it in place already."""
    work: dist.Work | None = None
    if axis.size > 1:
        work = _gather(flat, own, group=axis.group, async_op=True)
    return work
