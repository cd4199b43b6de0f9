"""The collectives of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from workbench.parallel.mesh import MeshAxis


def start_sum(flat: Tensor, axes: Sequence[MeshAxis]) -> list[dist.Work]:
    """Begin summing `flat` in place over the axes, one after the other; wait on what is returned."""
    works: list[dist.Work] = []
    for axis in axes:
        if axis.size > 1:
            for work in works:
                work.wait()
            work = dist.all_reduce(flat, group=axis.group, async_op=True)
            assert work is not None
            works.append(work)
    return works
