"""Timelines on CUDA by events, and NCCL's own durations, with stubs of both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.fake_cuda import FakeStream
from workbench.engine.measure.collective_watch import CollectiveWatch, TimedCall
from workbench.engine.measure.recorded_collective import RecordedCollective
from workbench.engine.measure.step_timeline import StepTimeline
from workbench.parallel.mesh import Mesh
from workbench.schedules import Action


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    return FakeStream().install(monkeypatch)


def timeline() -> StepTimeline:
    mesh = Mesh(0, 1, {})
    session: Any = SimpleNamespace(mesh=mesh, device=torch.device("cuda", 0), first_stage=0)
    found = StepTimeline(session)
    found.axis_of = {"stages": "pipeline", "shards": "data"}
    return found


def call(kind: str, group: str) -> TimedCall:
    return TimedCall(RecordedCollective(group, kind, 2, "bf16", 8, "F"), 0.0)


def test_spans_are_the_streams_and_a_wait_stands_before_its_compute(stream: FakeStream) -> None:
    found = timeline()
    with found.step():
        with found.action("1F0", Action(1, "F", 0)):
            found.begin_wait(call("recv", "stages"))
            stream.run(3.0)
            found.end_wait()
            stream.run(2.0)
            found.begin_wait(call("all_gather", "shards"))
            stream.run(1.0)
            found.end_wait()
            stream.run(4.0)
        with found.action("OPTIMIZER", None):
            stream.run(5.0)
    assert stream.synchronized == 1
    rows = [(r["action"], r["stage"], r["start"], r["end"]) for r in found.timeline_rows()]
    assert rows == [
        ("WAIT_RECV", 1, 0.0, 3.0),
        ("F", 1, 3.0, 5.0),
        ("WAIT_ALL_GATHER", 1, 5.0, 6.0),
        ("F", 1, 6.0, 10.0),
        ("OPTIMIZER", 0, 10.0, 15.0),
    ]


def test_a_wait_that_the_stream_did_not_feel_is_no_span(stream: FakeStream) -> None:
    found = timeline()
    with found.step(), found.action("0F0", Action(0, "F", 0)):
        for _ in range(3):
            stream.run(2.0)
            found.begin_wait(call("all_reduce", "shards"))
            stream.run(1e-6)
            found.end_wait()
    (row,) = found.timeline_rows()
    assert (row["action"], row["start"], row["end"]) == ("F", 0.0, pytest.approx(6.0))


def test_two_waits_for_an_input_leave_no_sliver_of_compute(stream: FakeStream) -> None:
    found = timeline()
    with found.step(), found.action("0F1", Action(0, "F", 1)):
        for kind, seconds in (("send", 1e-6), ("recv", 2.0)):
            found.begin_wait(call(kind, "stages"))
            stream.run(seconds)
            found.end_wait()
        stream.run(1.0)
    assert [row["action"] for row in found.timeline_rows()] == ["WAIT_RECV", "F"]


class NcclWork:
    """A work that knows its duration once timing was switched on."""

    def __init__(self, milliseconds: float | None) -> None:
        self.milliseconds = milliseconds

    def _get_duration(self) -> float:
        if self.milliseconds is None:
            raise RuntimeError("getDuration only works if timing was enabled")
        return self.milliseconds


@pytest.mark.parametrize("known, seconds", [(8.0, 0.008), (None, None)])
def test_nccls_own_durations_are_read(known: float | None, seconds: float | None) -> None:
    watch = CollectiveWatch(True, lambda: "F", lambda call: None, lambda: None)
    one = call("all_gather", "shards")
    work: Any = NcclWork(known)
    watch._track(work, one)
    watch.calls.append(one)
    watch.resolve()
    assert not one.works
    (row,) = watch.rows({"shards": "data"})
    assert (row["axis"], row["count"], row["seconds"]) == ("data", 1, seconds)


class Group:
    """Stands for torch's ProcessGroup while it is watched."""

    group_name = "shards"

    def __init__(self) -> None:
        self.timed = 0

    def _enable_collectives_timing(self) -> None:
        self.timed += 1

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: object, options: object) -> None:
        """Runs on the current stream, as NCCL does what is not asynchronous."""

    def send(self, tensors: object, peer: int, tag: int) -> NcclWork:
        return NcclWork(None)

    def _start_coalescing(self, device: object) -> None: ...

    def _end_coalescing(self, device: object) -> NcclWork:
        return NcclWork(5.0)


class Waited:
    def wait(self) -> bool:
        return True


def test_synchronous_calls_are_waits_and_a_batch_has_one_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "Work", Waited)
    told: list[str] = []
    watch = CollectiveWatch(
        True,
        lambda: "CLIP",
        lambda call: told.append(call.recorded.kind if call else "?"),
        lambda: told.append("end"),
    )
    group: Any = Group()
    x = torch.zeros(4)
    with watch.watching([group]):
        group.allreduce([x], SimpleNamespace(asyncOp=False))
        group.allreduce([x], SimpleNamespace(asyncOp=True))
        group._start_coalescing("cuda")
        group.send([x], 1, 0)
        group._end_coalescing("cuda")
    watch.resolve()
    assert group.timed == 1 and told == ["all_reduce", "end"]
    sums, send = watch.rows({})
    assert (sums["count"], send["kind"], send["bytes"]) == (2, "send", 16)
    assert send["seconds"] == 0.005
