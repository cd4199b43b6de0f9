"""Every way of starting a collective is seen: torch's, functional ones, and the project's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.sanitizer.async_sanitizer import AsyncSanitizer
from tests.sanitizer.sanitized_ranks import as_on_nccl
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel import async_collectives
from workbench.parallel.async_collectives import all_gather_async, reduce_scatter_async
from workbench.parallel.context.context_collectives import start_ring_transfer, wait_ring_transfer
from workbench.parallel.data import data_collectives
from workbench.parallel.expert.expert_collectives import all_to_all, exchange_counts
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.stage_transfers import start_recv, start_send, sum_tied_gradient
from workbench.parallel.tensor import tensor_collectives
from workbench.parallel.tensor.grid import grid_collectives

Started = tuple[Callable[[], object], list[Tensor], list[Tensor]]
"""(wait, what the collective reads, what it writes)."""
Start = Callable[[int, MeshAxis], Started]


def all_of(works: list[Any]) -> Callable[[], object]:
    return lambda: [work.wait() for work in works]


def all_reduce(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(4)
    return all_of([dist.all_reduce(x, async_op=True)]), [], [x]


def broadcast(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(4)
    work = dist.broadcast(x, 0, async_op=True)
    return all_of([work]), [x] if rank == 0 else [], [x] if rank else []


def reduce(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(4)
    return all_of([dist.reduce(x, 0, async_op=True)]), [], [x]


def all_gather(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(4), [torch.empty(4), torch.empty(4)]
    return all_of([dist.all_gather(out, x, async_op=True)]), [x], out


def all_gather_base(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(4), torch.empty(8)
    return all_of([dist._all_gather_base(out, x, async_op=True)]), [x], [out]


def reduce_scatter_base(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(8), torch.empty(4)
    return all_of([dist._reduce_scatter_base(out, x, async_op=True)]), [x], [out]


def gather(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(4), [torch.empty(4), torch.empty(4)] if rank == 0 else None
    return all_of([dist.gather(x, out, async_op=True)]), [x], out or []


def all_to_all_single(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(4), torch.empty(4)
    return all_of([dist.all_to_all_single(out, x, async_op=True)]), [x], [out]


def isend_irecv(rank: int, axis: MeshAxis) -> Started:
    x, theirs = torch.ones(4), torch.empty(4)
    return all_of([dist.isend(x, 1 - rank), dist.irecv(theirs, 1 - rank)]), [x], [theirs]


def batch_isend_irecv(rank: int, axis: MeshAxis) -> Started:
    x, theirs = torch.ones(4), torch.empty(4)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    return all_of(dist.batch_isend_irecv(ops)), [x], [theirs]


def coalesced_all_reduce(rank: int, axis: MeshAxis) -> Started:
    x, y = torch.ones(4), torch.ones(4)
    with dist._coalescing_manager(async_ops=True) as pending:
        dist.all_reduce(x)
        dist.all_reduce(y)
    return pending.wait, [], [x, y]


def coalesced_all_gather(rank: int, axis: MeshAxis) -> Started:
    (x, y), (outs) = (torch.ones(4), torch.ones(4)), [torch.empty(8), torch.empty(8)]
    with dist._coalescing_manager(async_ops=True) as pending:
        for out, source in zip(outs, (x, y)):
            dist.all_gather_into_tensor(out, source)
    return pending.wait, [x, y], outs


def coalesced_reduce_scatter(rank: int, axis: MeshAxis) -> Started:
    (x, y), (outs) = (torch.ones(8), torch.ones(8)), [torch.empty(4), torch.empty(4)]
    with dist._coalescing_manager(async_ops=True) as pending:
        for out, source in zip(outs, (x, y)):
            dist.reduce_scatter_tensor(out, source)
    return pending.wait, [x, y], outs


def functional_all_gather(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(4)
    out: Any = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    return out.wait, [x], [out.elem]


def functional_all_reduce(rank: int, axis: MeshAxis) -> Started:
    out: Any = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    return out.wait, [], [out.elem]


def all_gather_of_the_project(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(4), torch.empty(8)
    return all_gather_async(out, x, axis), [x], [out]


def reduce_scatter_of_the_project(rank: int, axis: MeshAxis) -> Started:
    x, out = torch.ones(8), torch.empty(4)
    return reduce_scatter_async(out, x, axis), [x], [out]


def bucket_all_reduce(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(8)
    wait = data_collectives.start_all_reduce(x, axis)
    assert wait is not None
    return wait, [], [x]


def bucket_all_gather(rank: int, axis: MeshAxis) -> Started:
    flat = torch.ones(8)
    shard = data_collectives.local_shard(flat, axis)
    wait = data_collectives.start_all_gather(flat, shard, axis)
    assert wait is not None
    return wait, [], [flat, shard]


def bucket_reduce_scatter(rank: int, axis: MeshAxis) -> Started:
    flat = torch.ones(8)
    wait = data_collectives.start_reduce_scatter(flat, axis)
    assert wait is not None
    return wait, [flat.chunk(2)[1 - rank]], [flat.chunk(2)[rank]]


def ring_transfer(rank: int, axis: MeshAxis) -> Started:
    x = torch.ones(4)
    transfer = start_ring_transfer([x], axis)
    return partial(wait_ring_transfer, transfer), [x], transfer.received


def stage_transfer(rank: int, axis: MeshAxis) -> Started:
    x, theirs = torch.ones(4), torch.empty(4)
    works = [start_send(x, 1 - rank, axis), start_recv(theirs, 1 - rank, axis)]
    return all_of(works), [x], [theirs]


ASYNCHRONOUS: list[Start] = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_base,
    reduce_scatter_base,
    gather,
    all_to_all_single,
    isend_irecv,
    batch_isend_irecv,
    coalesced_all_reduce,
    coalesced_all_gather,
    coalesced_reduce_scatter,
    functional_all_gather,
    functional_all_reduce,
    all_gather_of_the_project,
    reduce_scatter_of_the_project,
    bucket_all_reduce,
    bucket_all_gather,
    bucket_reduce_scatter,
    ring_transfer,
    stage_transfer,
]


def kinds_found(start: Start, rank: int) -> dict[str, list[set[str]]]:
    """Kinds reported of each tensor that the collective reads, and of each that it writes: when it
    is read in flight, when it is written in flight, and when both happen after the wait.
    """
    axis = MeshAxis("data", 2, rank, (0, 1), dist.group.WORLD)
    found: dict[str, list[set[str]]] = {"read": [], "written": [], "waited": []}
    with as_on_nccl(), AsyncSanitizer() as sanitizer:
        wait, reads, writes = start(rank, axis)

        def kinds(touch: Callable[[], object]) -> set[str]:
            touch()
            return {each.kind for each in sanitizer.take()}

        for side, tensors in (("read", reads), ("written", writes)):
            for x in tensors:
                found[side] += [kinds(x.sum), kinds(partial(x.mul_, 1))]
        wait()
        found["waited"] = [kinds(partial(x.mul_, 1)) for x in (*reads, *writes)]
    assert not sanitizer.violations
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, list[set[str]]]]]:
    """By rank and by the name of what starts the collective."""
    return run_ranks(2, lambda rank: {s.__name__: kinds_found(s, rank) for s in ASYNCHRONOUS})


@pytest.mark.parametrize("start", ASYNCHRONOUS, ids=lambda start: start.__name__)
def test_an_asynchronous_call_guards_its_tensors_until_its_wait(
    start: Start, found: list[dict[str, dict[str, list[set[str]]]]]
) -> None:
    for kinds in (of_rank[start.__name__] for of_rank in found):
        assert kinds["waited"]
        assert kinds["read"] == [set(), {"writes"}] * (len(kinds["read"]) // 2)
        assert kinds["written"] == [{"reads"}, {"writes"}] * (len(kinds["written"]) // 2)
        assert not any(kinds["waited"])


def run_all(rank: int) -> list[str]:
    axis = MeshAxis("data", 2, rank, (0, 1), dist.group.WORLD)
    with as_on_nccl(), AsyncSanitizer() as sanitizer:
        x = torch.ones(2, 4, 4)
        tensor_collectives.all_reduce(x, axis).add_(1)
        tensor_collectives.all_gather(x, axis).add_(1)
        tensor_collectives.reduce_scatter(x, axis).add_(1)
        all_to_all(x, [1, 1], [1, 1], axis).add_(1)
        exchange_counts(torch.tensor([1, 2]), axis).tolist()
        sum_tied_gradient(x, axis, ([rank], [1 - rank]))
        block = grid_collectives.broadcast(x, axis, 0), grid_collectives.reduce(x.clone(), axis, 1)
        for each in grid_collectives.run_moves(*block):
            each.add_(1)
        grid_collectives.swap_with_peer(x, axis, 1 - rank).add_(1)
        async_collectives.run_collective(dist.all_reduce, x)
        x.add_(1)
    return list(map(str, sanitizer.violations))


def test_wrappers_that_wait_leave_their_tensors_free() -> None:
    assert run_ranks(2, run_all) == [[], []]
