"""Deadlines of collectives: long in the first step and at checkpoints, short otherwise.

NCCL aborts a rank whose collective is not over in time. In the first step ranks compile kernels,
and some for longer than others; torchtitan too sets the deadline of training after it. At a
checkpoint a rank may wait for its disk.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from workbench.parallel.mesh import Mesh
from workbench.runtime_facts.phase_deadlines import SLOW_FACTOR


def extend_deadlines(mesh: Mesh, seconds: float) -> None:
    """Before the first step, or a checkpoint; `seconds` is the deadline of any other collective."""
    _set_deadlines(mesh, SLOW_FACTOR * seconds)


def restore_deadlines(mesh: Mesh, seconds: float, device: torch.device) -> None:
    """After the first step, or a checkpoint; waits until all ranks have done it, or the next
    collective of one that is early would not wait for one that is late.
    """
    if mesh.world_size > 1:
        dist.all_reduce(done := torch.zeros(1, device=device))
        done.item()
    _set_deadlines(mesh, seconds)


def _set_deadlines(mesh: Mesh, seconds: float) -> None:
    if mesh.world_size == 1:
        return
    groups = {
        id(group): group
        for axis in mesh.axes.values()
        for group in (axis.group, *axis.pair_groups.values())
        if group is not None
    }
    for group in (dist.group.WORLD, *groups.values()):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
