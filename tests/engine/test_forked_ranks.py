"""What forked ranks say of a rank that refuses or dies."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from workbench.engine.verify.forked_ranks import RankError, run_ranks
from workbench.errors import PlanError, refuse


def _refused(rank: int) -> None:
    raise refuse("", "a.safetensors is damaged")


def _killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_what_a_rank_refuses_has_no_traceback() -> None:
    with pytest.raises(PlanError) as error:
        run_ranks(2, _refused)
    assert str(error.value) == "a.safetensors is damaged"


def test_a_killed_rank_is_named_and_not_those_that_lost_it() -> None:
    with pytest.raises(RankError, match=r"^rank 1 died without an error message$"):
        run_ranks(2, _killed)
