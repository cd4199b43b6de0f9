"""The staged process group on CPU tensors: every call the project makes, and a dropped wait."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.parts.staged_ranks import FAULT_SECONDS, PLANS
from tests.gpu.staged_group import StagedGroup, StagedWork
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks

RANKS = 2
COUNTS = ([2, 1], [3, 2])
"""Rows that a rank sends to each."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def own(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers, others on every rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 10 * rank).view(shape).to(dtype)


def every_call(dtype: torch.dtype, rank: int) -> dict[str, bool]:
    """Call -> whether it gave what it should."""
    mine, other = (own(each, dtype, 4, 3) for each in (rank, 1 - rank))
    both = [own(each, dtype, 4, 3) for each in range(RANKS)]
    found: dict[str, bool] = {}

    summed = mine.clone()
    dist.all_reduce(summed)
    found["all_reduce"] = torch.equal(summed, sum(both[1:], both[0]))

    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found["all_reduce of the largest"] = torch.equal(largest, both[1])

    flat = torch.empty(8, 3, dtype=dtype)
    flat[4 * rank :][:4] = mine
    dist.all_gather_into_tensor(flat, flat[4 * rank :][:4])
    found["all_gather_into_tensor, in place"] = torch.equal(flat, torch.cat(both))

    pieces = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(pieces, mine)
    found["all_gather"] = all(torch.equal(a, b) for a, b in zip(pieces, both))

    source = mine.clone()
    part = source.chunk(RANKS)[rank]
    dist.reduce_scatter_tensor(part, source)
    found["reduce_scatter_tensor, in place"] = torch.equal(
        part, sum(both[1:], both[0]).chunk(RANKS)[rank]
    )

    sent, received = (COUNTS[rank], [row[rank] for row in COUNTS])
    rows = torch.empty(sum(received), 3, dtype=dtype)
    dist.all_to_all_single(rows, own(rank, dtype, sum(sent), 3), received, sent)
    from_each = [
        own(each, dtype, sum(COUNTS[each]), 3).split(COUNTS[each]) for each in range(RANKS)
    ]
    expected = torch.cat([parts[rank] for parts in from_each])
    found["all_to_all_single, uneven"] = torch.equal(rows, expected)

    word = mine.clone()
    dist.broadcast(word, group_src=1)
    found["broadcast"] = torch.equal(word, both[1])

    total = mine.clone()
    dist.reduce(total, group_dst=0)
    found["reduce"] = rank == 1 or torch.equal(total, sum(both[1:], both[0]))

    into = torch.empty_like(mine)
    ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["batch_isend_irecv"] = torch.equal(into, other)

    one = dist.isend(mine, 1 - rank) if rank == 0 else dist.irecv(into.zero_(), 1 - rank)
    assert one is not None
    one.wait()
    found["isend and irecv"] = rank == 0 or torch.equal(into, other)
    dist.barrier()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_call(dtype: torch.dtype) -> None:
    for found in run_ranks(RANKS, partial(every_call, dtype), 30, "staged"):
        assert all(found.values()), found


@pytest.mark.parametrize("name", ["zero-3 each microbatch", "ring", "operators"])
def test_two_ranks_equal_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedGroup, "delay_seconds", 1e-4)
    answer = verify(PLANS[name], "fp64", backend="staged")
    assert answer["passed"], answer


def test_a_dropped_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedGroup, "delay_seconds", FAULT_SECONDS)
    monkeypatch.setattr(StagedWork, "wait", lambda work, timeout=None: True)
    answer = verify(PLANS["ddp"], "fp64", backend="staged")
    assert answer["worst"]["relative"] > 100 * answer["tolerance"]


def test_a_call_reads_and_writes_after_it_returns() -> None:
    """As NCCL's do: what the caller writes before the wait is what is sent."""
    assert run_ranks(RANKS, overwritten, 30, "staged") == [[True, True]] * RANKS


def overwritten(rank: int) -> list[bool]:
    StagedGroup.delay_seconds = 0.2
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    x.fill_(2.0)
    early = bool((x == 2).all())
    assert work is not None
    work.wait()
    return [early, bool((x == 4).all())]
