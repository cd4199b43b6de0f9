"""The collective of plain data parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis


def start_sum(flat: Tensor, axis: MeshAxis) -> dist.Work | None:
    """Begin summing `flat` in place over the data axis; wait on what is returned."""
    if axis.size == 1:
        return None
    return dist.all_reduce(flat, group=axis.group, async_op=True)
