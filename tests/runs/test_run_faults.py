"""What breaks, and who is blamed for it; after each the fixture proves that no process is left."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Any

import psutil
import pytest

from tests.runs.conftest import processes_of, until
from workbench.runs import Reader
from workbench.runs.run import Run


def pids(run: Run) -> dict[int, Any]:
    """Process ids by rank, once every rank has said hello and taken a step."""

    def all_stepping() -> dict[int, Any] | None:
        records = Reader(run.dir).poll()
        if {r["rank"] for r in records if r["kind"] == "step"} == {0, 1, 2}:
            return {r["rank"]: r["pid"] for r in records if r["kind"] == "hello"}
        return None

    pids: dict[int, Any] = until(all_stepping)
    return pids


def test_a_killed_rank_is_blamed_not_its_survivors(go: Callable[..., Any]) -> None:
    run = go(steps=500)
    os.kill(pids(run)[1], signal.SIGKILL)
    state = run.wait(30)
    assert state.phase == "failed" and state.cause.rank == 1
    assert (
        "rank 1 was killed by SIGKILL" in state.cause.message
        and "last step done" in state.cause.message
    )
    assert state.cause.advice


def test_a_raising_rank_is_blamed_with_its_words(go: Callable[..., Any]) -> None:
    run = go("raise:2:3", steps=500)
    state = run.wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 2)
    assert (
        "RuntimeError: CUDA out of memory" in state.cause.message
        and "step 3" in state.cause.message
    )
    assert "strategy.tensor" in state.cause.advice
    assert "RuntimeError" in state.cause.log_tail


def test_survivors_say_connection_closed_and_are_not_blamed(go: Callable[..., Any]) -> None:
    run = go("raise:2:3", steps=500)
    state = run.wait(30)
    others = [
        p for p in (run.dir / "errors").glob("*.json") if json.loads(p.read_bytes())["rank"] != 2
    ]
    assert state.cause.rank == 2 and len(others) <= 2


def test_an_exit_without_a_word_is_explained_by_the_log(go: Callable[..., Any]) -> None:
    state = go("exit:1:2", steps=500).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "exit code 7" in state.cause.message and "native code gave up" in state.cause.message
    assert "rank00001.log" in state.cause.advice


def test_a_frozen_rank_is_named(go: Callable[..., Any]) -> None:
    run = go(steps=5000, progress_seconds=2.5)
    os.kill(pids(run)[2], signal.SIGSTOP)
    until(lambda: "rank 2 is frozen: its process is stopped (SIGSTOP)" in run.state.warning)
    assert run.state.phase == "running" and "rank 2 is frozen" in repr(run)
    state = run.wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 2)
    assert "rank 2 is frozen" in state.cause.message
    assert "Something stopped its process" in state.cause.advice


def test_a_rank_that_never_says_hello_is_named(go: Callable[..., Any]) -> None:
    state = go("silent:1", hello_seconds=2.0).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "rank 1 of 3 never said hello within" in state.cause.message
    assert "a device that never comes" in state.cause.log_tail


def test_a_rank_that_is_slow_to_start_is_waited_for_while_it_works(go: Callable[..., Any]) -> None:
    assert go("late:1:6", hello_seconds=3.0).wait(60).phase == "finished"


def test_a_rank_that_works_for_ever_before_it_says_hello_is_named(go: Callable[..., Any]) -> None:
    state = go("late:1:999", hello_seconds=0.5).wait(60)
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "rank 1 of 3 never said hello within" in state.cause.message


def test_ranks_that_cannot_connect_name_the_group_and_who_has_not_come_to_it(
    go: Callable[..., Any],
) -> None:
    state = go("stuck:2", hello_seconds=1.5).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 2)
    assert "ranks 0, 1, 2 of 3 never said hello within" in state.cause.message
    assert "(rank 2: joining the data group of ranks 0, 1, 2)" in state.cause.message


def test_an_end_without_bye_is_no_success(go: Callable[..., Any]) -> None:
    state = go("nobye:1").wait(30)
    assert (state.phase, state.exit_code, state.cause.rank) == ("failed", 0, 1)


def test_nothing_outlives_a_killed_supervisor(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    pids(run)
    os.kill(run.state.supervisor_pid, signal.SIGKILL)
    until(lambda: not processes_of(run), seconds=5)
    state = run.state
    assert state.phase == "failed" and "supervisor of this run is gone" in state.cause.message
    assert run.wait(1).phase == "failed"
    run.stop()
    assert not (run.dir / "stop").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_launcher(go: Callable[..., Any], number: Signals) -> None:
    run = go(steps=5000)
    pids(run)
    os.kill(run.state.launcher_pid, number)
    state = run.wait(30)
    assert (
        state.phase == "failed" and f"launcher was killed by {number.name}" in state.cause.message
    )
    assert "Something outside the run killed it" in state.cause.advice


@pytest.mark.slow
def test_a_launcher_that_does_not_end_is_ended(go: Callable[..., Any]) -> None:
    run = go(steps=60, progress_seconds=2.5)
    pids(run)
    os.kill(run.state.launcher_pid, signal.SIGSTOP)
    until(lambda: "the launcher is stopped (SIGSTOP)" in run.state.warning)
    assert run.wait(30).phase == "finished"


def test_a_frozen_launcher_does_not_hide_a_killed_rank(go: Callable[..., Any]) -> None:
    run = go(steps=5000, progress_seconds=2.5)
    numbers = pids(run)
    os.kill(run.state.launcher_pid, signal.SIGSTOP)
    os.kill(numbers[1], signal.SIGKILL)
    state = run.wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "rank 1 was killed by SIGKILL" in state.cause.message


def test_what_was_frozen_and_goes_on_is_warned_of_no_more(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    numbers = pids(run)
    for pid, words in (
        (numbers[0], "rank 0 is frozen"),
        (run.state.launcher_pid, "the launcher is stopped"),
    ):
        os.kill(pid, signal.SIGSTOP)
        until(lambda words=words: words in run.state.warning)
        os.kill(pid, signal.SIGCONT)
        until(lambda: not run.state.warning)
    assert run.state.phase == "running"
    run.stop()
    assert run.wait(30).phase == "stopped"


def test_a_slow_rank_is_named_with_its_factor_and_phase(go: Callable[..., Any]) -> None:
    run = go("slow:1", steps=40)
    until(lambda: "rank 1 is slow: 1.00 s of its own a step" in run.state.warning)
    state = run.wait(30)
    assert state.phase == "finished"
    assert "47.7 times its peers' 21.0 ms, most of it in forward" in state.warning
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_bytes().splitlines()]
    assert ["is slow" in e["message"] for e in events if e["kind"] == "warning"] == [True]


def test_a_frozen_supervisor_is_told_and_woken_by_stop(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    until(lambda: run.state.phase == "running")
    os.kill(run.state.supervisor_pid, signal.SIGSTOP)
    until(lambda: "the supervisor is stopped (SIGSTOP)" in run.state.warning)
    assert run.state.phase == "running"
    run.stop()
    assert run.wait(30).phase == "stopped"


def test_a_stop_reaches_ranks_and_a_launcher_that_are_frozen(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    numbers = pids(run)
    for pid in (numbers[1], run.state.launcher_pid):
        os.kill(pid, signal.SIGSTOP)
    run.stop()
    state = run.wait(20)
    assert (state.phase, state.exit_code) == ("stopped", 0)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_in_an_endless_loop_is_named(go: Callable[..., Any], world: int) -> None:
    state = go("loop:0:4", steps=5000, progress_seconds=1.5, world=world).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 0)
    assert (
        "no rank has written anything" in state.cause.message
        and "last step done: 3" in state.cause.message
    )
    assert "It hung" in state.cause.advice and "rank00000.log" in state.cause.advice


@pytest.mark.slow
def test_a_rank_that_holds_others_on_gpus_is_named_though_all_are_busy(
    go: Callable[..., Any],
) -> None:
    state = go("spin:1:4", steps=5000, progress_seconds=1.5, world=3).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 1)
    assert "rank 1 is furthest behind, and no rank has written anything" in state.cause.message
    assert "the deadline of training is 3 s" in state.cause.message
    assert "It hung" in state.cause.advice


def test_ranks_that_the_watchdog_aborted_waited_for_the_one_that_the_launcher_ended(
    go: Callable[..., Any],
) -> None:
    state = go("watchdog:0:4", steps=5000).wait(30)
    assert (state.phase, state.cause.rank) == ("failed", 0)
    assert "rank 0 stopped answering (training, last step done: 3" in state.cause.message
    assert "SIG" not in state.cause.message
    assert "It hung" in state.cause.advice and "timeout_seconds" not in state.cause.advice


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "other").open("ab", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


@pytest.mark.slow
def test_a_full_disk_does_not_end_a_run(go: Callable[..., Any], small_disk: Path) -> None:
    run = go(steps=150, world=1, progress_seconds=1.0, root=small_disk)
    until(lambda: run.state.phase == "running")
    fill(small_disk)
    beat = run.state.heartbeat
    state = run.wait(30)
    assert (state.phase, state.exit_code, state.cause) == ("finished", 0, None)
    assert state.heartbeat > beat and "the disk was full" in state.warning


@pytest.mark.slow
def test_a_failure_on_a_full_disk_names_the_disk(go: Callable[..., Any], small_disk: Path) -> None:
    run = go("raise:0:150", steps=5000, world=1, root=small_disk)
    until(lambda: run.state.phase == "running")
    fill(small_disk)
    state = run.wait(30)
    assert state.phase == "failed" and "No space left on device" in state.cause.message
    assert "Free disk space" in state.cause.advice


def test_a_run_on_a_full_disk_can_be_stopped(go: Callable[..., Any], small_disk: Path) -> None:
    run = go(steps=5000, world=1, root=small_disk)
    until(lambda: run.state.phase == "running")
    fill(small_disk)
    run.stop()
    assert run.wait(30).phase == "stopped"


@pytest.mark.slow
def test_what_a_rank_left_behind_is_ended(go: Callable[..., Any]) -> None:
    run = go("helper:1", steps=2)
    assert run.wait(30).phase == "finished"
    until(lambda: not processes_of(run), seconds=2)


def test_a_terminated_supervisor_stops_the_run(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    pids(run)
    os.kill(run.state.supervisor_pid, signal.SIGTERM)
    assert run.wait(30).phase == "stopped"


def test_a_number_that_another_process_has_now_is_not_believed(go: Callable[..., Any]) -> None:
    run = go(steps=5000)
    pids(run)
    state = json.loads((run.dir / "state.json").read_bytes())
    os.kill(state["supervisor_pid"], signal.SIGKILL)
    until(lambda: not processes_of(run), seconds=5)
    state |= {
        "supervisor_pid": os.getpid(),
        "supervisor_created": psutil.Process().create_time() - 100,
    }
    (run.dir / "state.json").write_text(json.dumps(state))
    assert run.state.phase == "failed"


def test_a_torn_last_record_is_left_out(go: Callable[..., Any]) -> None:
    run = go("torn:1", steps=3)
    assert run.wait(30).phase == "failed"
    assert [
        r["step"] for r in Reader(run.dir).poll() if r["kind"] == "step" and r["rank"] == 1
    ] == [0, 1, 2]


def test_a_worker_that_cannot_be_imported_is_told_as_such(go: Callable[..., Any]) -> None:
    state = go(module="tests.runs.absent").wait(30)
    assert state.phase == "failed"
    assert "No module named" in state.cause.message and "doctor" in state.cause.advice


@pytest.mark.parametrize("content", [b"", b"{", b'{"unknown": 1}'])
def test_a_stop_file_made_by_hand_works(go: Callable[..., Any], content: bytes) -> None:
    run = go(steps=5000)
    until(lambda: run.state.phase == "running")
    (run.dir / "stop").write_bytes(content)
    assert run.wait(30).phase == "stopped"
