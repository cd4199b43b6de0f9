"""The first step has a longer deadline than those that follow."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.parallel.small import plan
from workbench.engine.process_group.collective_deadlines import extend_deadlines, restore_deadlines
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import CPU, build_mesh

SECONDS = 1.0


def waited(rank: int) -> list[bool]:
    """Whether rank 1's lateness of 1.5 deadlines is too much, in the first step and afterwards, on
    the tensor group and among all.
    """
    mesh = build_mesh(plan(1, 2, 1).resolve(), rank)
    group, found = mesh["tensor"].group, []
    extend_deadlines(mesh, SECONDS)
    for each in (group, None):
        found.append(late(rank, each))
    restore_deadlines(mesh, SECONDS, CPU)
    found.append(late(rank, group))
    return found


def late(rank: int, group: dist.ProcessGroup | None) -> bool:
    if rank == 1:
        time.sleep(1.5 * SECONDS)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return True
    return False


@pytest.mark.slow
def test_collectives_wait_longer_in_the_first_step() -> None:
    assert run_ranks(2, waited)[0] == [False, False, True]
