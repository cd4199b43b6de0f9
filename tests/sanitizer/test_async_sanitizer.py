"""Each kind of violation, planted alone on two ranks, is reported; correct code is not."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.sanitizer.async_sanitizer import AsyncSanitizer, Violation
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.async_collectives import _all_gather

ALL_GATHER: Any = _all_gather
Planted = Callable[[int], object]
"""Code under the sanitizer, called with the rank. `# starts` and `# touches` mark its lines."""


Found = dict[str, list[Violation]]
"""What both ranks report, by the name of the code."""


def sanitized(rank: int) -> Found:
    """All of it on one rank: a pair of ranks for each would take longer than what they run."""
    found: Found = {}
    for planted in (*ALONE, *NEVER_WAITED, *CORRECT, frees_what_is_received):
        with AsyncSanitizer() as sanitizer:
            planted(rank)
        found[planted.__name__] = sanitizer.violations
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    first, second = run_ranks(2, sanitized)
    return {name: [*violations, *second[name]] for name, violations in first.items()}


def line_of(planted: Planted, mark: str) -> str:
    source, first = inspect.getsourcelines(planted)
    (index,) = (i for i, line in enumerate(source) if f"# {mark}" in line)
    return f"tests/sanitizer/test_async_sanitizer.py:{first + index}"


def all_reduce_done(x: Tensor) -> Any:
    """Start an all-reduce and let gloo finish it: what a planted fault then does, harms nobody.

    The sanitizer has not been told.
    """
    work: Any = dist.all_reduce(x, async_op=True)
    deadline = time.monotonic() + 30
    while not work._inner.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return work


def writes_an_input(rank: int) -> None:
    x, out = torch.ones(3), torch.empty(6)
    work = ALL_GATHER(out, x, async_op=True)  # starts
    x.add_(1)  # touches
    work.wait()


def writes_an_output(rank: int) -> None:
    x, out = torch.ones(3), torch.empty(6)
    work = ALL_GATHER(out, x, async_op=True)  # starts
    torch.add(x, 1, out=out[:3])  # touches
    work.wait()


def reads_an_output(rank: int) -> None:
    x, out = torch.ones(3), torch.empty(6)
    work = ALL_GATHER(out, x, async_op=True)  # starts
    out.view(2, 3)[1].sum()  # touches
    work.wait()


def reads_in_place(rank: int) -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)  # starts
    x * 2  # touches
    work.wait()


def reads_in_backward(rank: int) -> None:
    x = torch.ones(3)
    y = torch.ones(3, requires_grad=True) * x
    work = dist.all_reduce(x, async_op=True)  # starts
    y.sum().backward()  # touches
    work.wait()


def reads_as_a_list(rank: int) -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)  # starts
    x.tolist()  # touches
    work.wait()


def starts_another(rank: int) -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)  # starts
    again = dist.all_reduce(x, async_op=True)  # touches
    work.wait()
    again.wait()


def writes_what_is_sent(rank: int) -> None:
    x, theirs = torch.ones(3), torch.empty(3)
    receive = dist.irecv(theirs, 1 - rank)
    send = dist.isend(x, 1 - rank)  # starts
    x.zero_()  # touches
    send.wait()
    assert receive is not None
    receive.wait()


def reads_what_is_received(rank: int) -> None:
    x, theirs = torch.ones(3), torch.empty(3)
    send = dist.isend(x, 1 - rank)
    receive = dist.irecv(theirs, 1 - rank)  # starts
    theirs.clone()  # touches
    send.wait()
    assert receive is not None
    receive.wait()


def resizes_by_operator(rank: int) -> None:
    x = torch.ones(3)
    work = all_reduce_done(x)  # starts
    torch.ops.inductor.resize_storage_bytes_(x, 24)  # touches
    work.wait()


def resizes_a_tensor(rank: int) -> None:
    x = torch.ones(3)
    work = all_reduce_done(x)  # starts
    x.resize_(5)  # touches
    work.wait()


def replaces_a_storage(rank: int) -> None:
    x = torch.ones(3)
    before = x.detach()  # or else the storage would be freed besides
    work = all_reduce_done(x)  # starts
    x.set_(torch.zeros(3).untyped_storage())  # touches
    work.wait()
    del before


def resizes_a_storage(rank: int) -> None:
    x = torch.ones(3)
    work = all_reduce_done(x)  # starts
    x.untyped_storage().resize_(24)  # touches
    work.wait()


ALONE: dict[Planted, tuple[str, str, tuple[int, ...], str, tuple[int, ...]]] = {
    writes_an_input: ("writes", "aten.add_.Tensor", (3,), "all_gather", (6,)),
    writes_an_output: ("writes", "aten.add.out", (3,), "all_gather", (6,)),
    reads_an_output: ("reads", "aten.sum.default", (3,), "all_gather", (6,)),
    reads_in_place: ("reads", "aten.mul.Tensor", (3,), "all_reduce", (3,)),
    reads_in_backward: ("reads", "aten.mul.Tensor", (3,), "all_reduce", (3,)),
    reads_as_a_list: ("reads", "the host", (3,), "all_reduce", (3,)),
    starts_another: ("writes", "c10d.allreduce_.default", (3,), "all_reduce", (3,)),
    writes_what_is_sent: ("writes", "aten.zero_.default", (3,), "send", (3,)),
    reads_what_is_received: ("reads", "aten.clone.default", (3,), "recv", (3,)),
    resizes_by_operator: (
        *("resizes", "inductor.resize_storage_bytes_.default", (3,)),
        *("all_reduce", (3,)),
    ),
    resizes_a_tensor: ("resizes", "aten.resize_.default", (3,), "all_reduce", (3,)),
    replaces_a_storage: ("resizes", "aten.set_.source_Storage", (3,), "all_reduce", (3,)),
    resizes_a_storage: ("resizes", "UntypedStorage.resize_", (12,), "all_reduce", (3,)),
}


@pytest.mark.parametrize("planted", ALONE, ids=lambda planted: planted.__name__)
def test_a_violation_is_reported_with_both_lines(planted: Planted, found: Found) -> None:
    violations = found[planted.__name__]
    assert [each.rank for each in violations] == [0, 1], violations
    kind, operator, shape, collective, collective_shape = ALONE[planted]
    for each in violations:
        assert (each.kind, each.operator, each.shape) == (kind, operator, shape)
        assert (each.collective, each.collective_shape) == (collective, collective_shape)
        assert each.ranks == (0, 1)
        assert each.line.split(" < ")[0] == line_of(planted, "touches")
        assert line_of(planted, "starts") in each.collective_line.split(" < ")[:2]
        for part in (f"rank {each.rank}", operator, kind, str(list(shape)), collective):
            assert part in str(each)
        assert each.line in str(each) and each.collective_line in str(each)


KEPT: list[Any] = []


def drops_the_handle(rank: int) -> None:
    KEPT.append(torch.ones(3))
    dist.all_reduce(KEPT[-1], async_op=True)  # starts
    torch.zeros(1)


def keeps_the_handle(rank: int) -> None:
    KEPT.append(torch.ones(3))
    KEPT.append(dist.all_reduce(KEPT[-1], async_op=True))  # starts


def waits_after_the_step(rank: int) -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)  # starts
    _get_current_dispatch_mode().expect_none_in_flight()
    work.wait()


NEVER_WAITED: list[Planted] = [drops_the_handle, keeps_the_handle, waits_after_the_step]


@pytest.mark.parametrize("planted", NEVER_WAITED, ids=lambda planted: planted.__name__)
def test_a_collective_that_is_never_waited_for_is_reported(planted: Planted, found: Found) -> None:
    violations = found[planted.__name__]
    assert [(each.kind, each.rank) for each in violations] == [
        ("never waits", 0),
        ("never waits", 1),
    ]
    for each in violations:
        assert (each.collective, each.collective_shape) == ("all_reduce", (3,))
        assert each.collective_line.split(" < ")[0] == line_of(planted, "starts")
        assert "never waits for all_reduce of [3] over ranks [0, 1]" in str(each)


def frees_what_is_received(rank: int) -> None:
    # Neither the handle, which would hold the tensor, nor the tensor itself is kept.
    dist.irecv(torch.empty(3), 1 - rank)  # starts
    torch.zeros(1)


def test_a_storage_that_is_freed_in_flight_is_reported(found: Found) -> None:
    violations = [each for each in found["frees_what_is_received"] if each.kind == "frees"]
    assert [(each.rank, each.collective, each.shape) for each in violations] == [
        (0, "recv", (3,)),
        (1, "recv", (3,)),
    ]


def waits_then_touches(rank: int) -> None:
    x, out = torch.ones(3), torch.empty(6)
    ALL_GATHER(out, x, async_op=True).wait()
    x.add_(out[:3])
    out.untyped_storage().resize_(0)
    dist.all_reduce(x)
    x.add_(1)


def reads_what_is_read(rank: int) -> None:
    x, out = torch.ones(3), torch.empty(6)
    work = ALL_GATHER(out, x, async_op=True)
    x.sum().item()
    x.tolist()
    work.wait()


def touches_other_bytes(rank: int) -> None:
    whole = torch.ones(6)
    work = dist.all_reduce(whole[:3], async_op=True)
    whole[3:].add_(whole[5:].sum())
    work.wait()


def takes_views_only(rank: int) -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.view(2, 2).t()[0].detach().unsqueeze(0).expand(3, 2)
    torch.empty_like(x), x.new_zeros(2), torch.zeros_like(x), x.shape, x.chunk(2), x.is_pinned()
    x.resize_(2, 2)  # of the same size
    work.wait()


def finds_it_completed(rank: int) -> None:
    x = torch.ones(3)
    work: Any = dist.all_reduce(x, async_op=True)
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    x.add_(1)


def reads_the_root_of_a_broadcast(rank: int) -> None:
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)
    if rank == 0:
        x.sum()
    work.wait()


CORRECT: list[Planted] = [
    waits_then_touches,
    reads_what_is_read,
    touches_other_bytes,
    takes_views_only,
    finds_it_completed,
    reads_the_root_of_a_broadcast,
]


@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.__name__)
def test_correct_code_is_not_reported(correct: Planted, found: Found) -> None:
    assert found[correct.__name__] == []


def test_methods_are_restored() -> None:
    names = {torch.UntypedStorage: "resize_", Tensor: "tolist"}
    before = {owner: getattr(owner, name) for owner, name in names.items()}
    with AsyncSanitizer():
        assert all(getattr(owner, name) is not before[owner] for owner, name in names.items())
    assert all(getattr(owner, name) is before[owner] for owner, name in names.items())
