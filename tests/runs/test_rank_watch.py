"""Whom the supervisor blames where no rank writes any more, by records and steps."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest

from tests.runs.test_flight_recorder import done, dump, entry
from workbench.runs.diagnose.flight_recorder import PREFIX
from workbench.runs.launch import rank_watch
from workbench.runs.launch.rank_watch import RankWatch, _RankProcess
from workbench.runs.store.command_file import RunCommand


def silent(folder: Path, device: str, steps: list[int], busy: list[bool]) -> RankWatch:
    """Ranks that did these steps in a second each, and have written nothing for a minute."""
    (folder / "logs").mkdir()
    command = RunCommand([], {}, [], "/", len(steps), 99, hello_seconds=9, progress_seconds=2)
    watch, now = RankWatch(folder, command), time.monotonic()
    for rank, step in enumerate(steps):
        seen = watch.ranks[rank]
        seen.take({"kind": "hello", "rank": rank, "pid": 1, "device": device})
        seen.take({"kind": "phase", "phase": "training", "step": 0})
        if step >= 0:
            seen.take({"kind": "step", "step": step, "seconds": 1.0, "action": None})
        watch._processes[rank] = _RankProcess(None, now - 60, cpu=60.0 * busy[rank])
    return watch


def test_of_ranks_at_the_same_step_the_one_that_works_holds_those_that_wait(tmp_path: Path) -> None:
    cause = silent(tmp_path, "cpu", [4, 4, 4], [False, False, True]).verdict()
    assert cause is not None and cause.rank == 2 and "at work" in cause.message


def test_on_gpus_the_rank_that_did_fewest_steps_is_blamed(tmp_path: Path) -> None:
    """All are busy: ranks that wait for NCCL spin."""
    cause = silent(tmp_path, "cuda:0", [5, 4, 5], [True, True, True]).verdict()
    assert cause is not None and cause.rank == 1 and "at work" not in cause.message


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_where_ranks_are_equally_far_none_is_blamed(tmp_path: Path, device: str) -> None:
    cause = silent(tmp_path, device, [4, 4, 5], [False, False, False]).verdict()
    assert cause is not None and cause.rank is None
    assert "for 60 s, and ranks are equally far (training, last step done: 4)" in cause.message


def test_ranks_that_wait_in_a_collective_have_its_deadline_first(tmp_path: Path) -> None:
    """It begins after the last record, and then says for whom a rank waited."""
    watch = silent(tmp_path, "cpu", [5, 4], [False, False])
    for process in watch._processes.values():
        process.last_record = time.monotonic() - 7.5
    assert watch.verdict() is None
    for process in watch._processes.values():
        process.last_record = time.monotonic() - 8.5
    assert (cause := watch.verdict()) is not None and cause.rank == 1


def test_on_gpus_idle_cores_say_nothing(tmp_path: Path) -> None:
    """A step may take ten times as long as the slowest, while the host waits for the GPU."""
    watch = silent(tmp_path, "cuda:0", [5, 5], [False, False])
    for seen in watch.ranks.values():
        seen.slowest = 10.0
    assert watch.verdict() is None


def test_what_ranks_entered_goes_before_the_steps_they_did(tmp_path: Path) -> None:
    watch = silent(tmp_path, "cuda:0", [4, 4], [True, True])
    for rank, calls in enumerate([(done("1", 1), entry("1", 2)), (done("1", 1),)]):
        (tmp_path / "logs" / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump(*calls)))
    cause = watch.verdict()
    assert cause is not None and cause.rank == 1
    assert "did not enter all-reduce 2 of the tensor group" in cause.message


@pytest.mark.parametrize("phase", ["building", "compiling", "evaluating", "training"])
def test_a_long_first_step_is_no_hang(tmp_path: Path, phase: str) -> None:
    """What writes only when it is through has ten times the deadline, of several ranks twice."""
    watch = silent(tmp_path, "cuda:0", [-1, -1], [True, True])
    for seen in watch.ranks.values():
        seen.phase = phase
    for process in watch._processes.values():
        process.last_record = time.monotonic() - 39
    assert watch.verdict() is None
    for process in watch._processes.values():
        process.last_record = time.monotonic() - 41
    assert watch.verdict() is not None


class Starting:
    """A process of a start: what it has used, and whether it waits for a core or a disk."""

    pid = 7

    def __init__(self, share: float, status: str) -> None:
        self.share, self._status = share, status

    def status(self) -> str:
        return self._status

    def cpu_times(self) -> tuple[float, float]:
        return self.share * time.monotonic(), 0.0


@pytest.mark.parametrize(
    ("share", "status", "seconds"),
    [
        (0.0, "sleeping", 9),
        (0.001, "sleeping", 9),
        (0.0, "stopped", 9),
        (0.2, "sleeping", 90),
        (0.0, "running", 90),
        (0.01, "disk-sleep", 90),
    ],
)
def test_the_deadline_of_a_start_counts_the_time_in_which_nothing_of_it_works(
    share: float, status: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded machine starts slowly; what works for ever is ended ten times as late."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(rank_watch, "descendants", lambda: [Starting(share, status)])
    command = RunCommand([], {}, [], "/", 2, 99, hello_seconds=9, progress_seconds=2)
    watch = RankWatch(tmp_path, command)
    while (cause := watch.verdict()) is None and now < 1200:
        now += 0.25
        watch.poll()
    assert cause is not None and "ranks 0, 1 of 2 never said hello" in cause.message
    assert now - 1000 == pytest.approx(seconds, abs=1.5)


def test_a_rank_that_has_said_hello_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(rank_watch, "descendants", lambda: [Starting(1.0, "running")])
    command = RunCommand([], {}, [], "/", 2, 99, hello_seconds=9, progress_seconds=2)
    watch = RankWatch(tmp_path, command)
    watch.ranks[0].take({"kind": "hello", "rank": 0, "pid": Starting.pid, "device": "cpu"})
    watch._processes[0] = _RankProcess(None, 1000.0)
    while (cause := watch.verdict()) is None and now < 1200:
        now += 0.25
        watch.poll()
    assert cause is not None and cause.rank == 1 and now - 1000 == pytest.approx(9, abs=1.5)
