"""Telemetry is read while it grows, and becomes frames little by little."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.lab.live.run_status import RunProgress, pace_line
from workbench.runs.run import Run
from workbench.runs.store.process_identity import is_process
from workbench.runs.store.run_liveness import read_state
from workbench.runs.store.run_state import (
    State,
    first_state,
    is_run,
    with_heartbeat,
    with_this_supervisor,
    write_state,
)
from workbench.runs.store.stop_request import Stop, read_stop, request_stop
from workbench.runs.store.telemetry_frames import MeasuredFrames
from workbench.runs.store.telemetry_reader import Reader
from workbench.runs.store.telemetry_records import NULLS


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    (tmp_path / "telemetry").mkdir()
    return tmp_path / "telemetry"


def step(number: int, **more: Any) -> bytes:
    told = {
        "kind": "step",
        "t": 0.5,
        "step": number,
        "loss": 1.0,
        "seconds": 0.1,
        "tokens": 8,
        **more,
    }
    return json.dumps(told).encode() + b"\n"


def test_a_torn_line_is_kept_until_it_is_whole(telemetry: Path) -> None:
    reader = Reader(telemetry.parent)
    assert reader.poll() == []
    file, line = telemetry / "rank00003.jsonl", step(1)
    file.write_bytes(step(0) + line[:20])
    assert [(r["rank"], r["step"]) for r in reader.poll()] == [(3, 0)]
    assert reader.poll() == []
    with file.open("ab") as stream:
        stream.write(line[20:] + step(2))
    assert [r["step"] for r in reader.poll()] == [1, 2]
    assert reader.poll() == [] and reader.damaged == {}


def test_every_cut_of_the_file_gives_the_same_records(telemetry: Path) -> None:
    whole = b"".join(step(n, action="é" * n) for n in range(4))
    for cut in range(len(whole) + 1):
        file = telemetry / "rank00000.jsonl"
        file.write_bytes(whole[:cut])
        reader = Reader(telemetry.parent)
        first = reader.poll()
        file.write_bytes(whole)
        assert [r["step"] for r in first + reader.poll()] == [0, 1, 2, 3]


def test_damaged_lines_are_left_out_and_counted(telemetry: Path) -> None:
    (telemetry / "rank00000.jsonl").write_bytes(step(0) + b'{"kind": "ste\n' + b"[1]\n\n" + step(1))
    reader = Reader(telemetry.parent)
    assert [r["step"] for r in reader.poll()] == [0, 1]
    assert reader.damaged == {0: 2} and reader.left_out == ["2 damaged records of rank 0"]


def test_other_files_are_not_telemetry(telemetry: Path) -> None:
    (telemetry / "rank00000.jsonl.swp").write_bytes(step(0))
    assert Reader(telemetry.parent).poll() == []


def test_records_of_64_ranks_are_all_read(telemetry: Path) -> None:
    for rank in range(64):
        (telemetry / f"rank{rank:05d}.jsonl").write_bytes(b"".join(step(n) for n in range(500)))
    reader = Reader(telemetry.parent)
    assert len(reader.poll()) == 32_000
    assert reader.poll() == []


def test_frames_grow_by_what_is_new() -> None:
    measured = MeasuredFrames("a", 1, capacity_bytes=100)
    hello = {"kind": "hello", "rank": 0, "stage": 1}
    first = {
        "kind": "step",
        "rank": 0,
        "step": 0,
        "loss": 2.0,
        "seconds": 0.5,
        "tokens": 10,
        "bytes": 70,
    }
    second = {**first, "step": 1, "loss": 1.0, "bytes": None}
    new = measured.add([hello, first])
    assert [row["loss"] for row in new["steps"]] == [2.0]
    assert [
        (row["stage"], row["moment"], row["category"], row["bytes"]) for row in new["memory"]
    ] == [(1, "after_optimizer", "allocated", 70)]
    new = measured.add([second, {"kind": "evaluation", "rank": 0, "step": 1, "loss": 1.5}])
    assert len(new["steps"]) == 1 and new["memory"] == []
    profile = measured.profile()
    assert profile.loss == [2.0, 1.0] and profile.tokens_per_second == 20
    assert profile.notes["evaluation"] == [{"step": 1, "loss": 1.5}]


def test_a_profile_without_records_is_empty_and_shows_itself() -> None:
    assert MeasuredFrames("a", 2).profile().summary()["memory"] == {
        "peak_bytes_by_rank": {},
        "by_category": {},
    }


def test_sampled_rows_carry_run_rank_and_step() -> None:
    measured = MeasuredFrames("a", 4)
    rows = [
        {
            "axis": "tensor",
            "kind": "all_reduce",
            "group_size": 2,
            "dtype": "fp32",
            "bytes": 8,
            "count": 3,
        }
    ]
    times = [{"stage": 0, "microbatch": 1, "action": "0F1", "start": 0.0, "end": 0.25}]
    measured.add([{"kind": "collectives", "rank": 2, "step": 7, "rows": rows}])
    measured.add([{"kind": "timeline", "rank": 3, "step": 8, "rows": times}])
    profile = measured.profile()
    assert profile.collectives.iloc[0][["run", "source", "rank", "step", "kind"]].tolist() == [
        "a",
        "measured",
        2,
        7,
        "all_reduce",
    ]
    assert profile.timeline.iloc[0][["rank", "step", "action", "end"]].tolist() == [
        3,
        8,
        "0F1",
        0.25,
    ]


def test_waiting_for_data_is_a_share_of_the_rank_that_waits_most() -> None:
    """The first two steps, which warm up, do not count; nor does a run without the field."""
    measured, progress = MeasuredFrames("a", 2), RunProgress(6, 2)
    for rank, waits in ((0, (9, 9, 1, 1, 1, 1)), (1, (9, 9, 0, 1, 2, 3))):
        records = [
            {**NULLS["step"], "kind": "step", "rank": rank, "step": n, "seconds": 10.0}
            | {"loss": 1.0, "tokens": 8, "data_seconds": wait}
            for n, wait in enumerate(waits)
        ]
        measured.add(records)
        progress.add_records(records)
    profile = measured.profile()
    assert profile.data_share == profile.summary()["data_share"] == 0.15
    assert profile.facts()["data loading"] == "15 % of the step time"
    assert " · data loading 37 %" in pace_line(first_state(2, 6), progress)
    before = MeasuredFrames("b", 1)
    before.add([{**NULLS["step"], "kind": "step", "rank": 0, "step": 0, "seconds": 10.0}])
    assert before.profile().data_share is None
    assert "data_share" not in before.profile().summary()


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "weird"},
        {"world_size": "x"},
        {"steps": None},
        {"heartbeat": None},
        {"ended": "now"},
    ],
)
def test_a_damaged_state_is_no_run(tmp_path: Path, change: dict[str, Any]) -> None:
    write_state(tmp_path, State(**{**vars(first_state(4, 10)), **change}))
    assert not is_run(tmp_path)
    with pytest.raises(ValueError, match=r"is not a run directory: state\.json is damaged"):
        read_state(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"phase": 1, "cause": {"x": 1}}', "\xff"])
def test_a_state_that_is_none_is_damaged_in_those_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"is not a run directory: state\.json is damaged$"):
        read_state(tmp_path)


def test_a_state_is_replaced_whole(tmp_path: Path) -> None:
    state = first_state(4, 10)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_run_on_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    state = State(
        "running",
        2,
        5,
        heartbeat=time.time(),
        host="elsewhere",
        supervisor_pid=1,
        supervisor_created=1.0,
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path).phase == "running"
    write_state(tmp_path, State(**{**vars(state), "heartbeat": time.time() - 120}))
    assert read_state(tmp_path).phase == "failed"


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Any]:
    """The state of a run whose supervisor is this process."""

    def keep(**changes: Any) -> State:
        state = replace(
            with_heartbeat(with_this_supervisor(replace(first_state(2, 5), phase="running"))),
            **changes,
        )
        write_state(tmp_path, state)
        return state

    return keep


def test_a_clock_that_is_set_ends_no_run(tmp_path: Path, mine: Callable[..., Any]) -> None:
    """The start of a process in seconds since the epoch moves with the clock, in ticks since boot
    it does not.
    """
    mine(supervisor_created=psutil.Process().create_time() - 3600, heartbeat=time.time() - 3600)
    state = read_state(tmp_path)
    assert (state.phase, state.warning) == ("running", "")
    Run(tmp_path).stop()
    assert read_stop(tmp_path) is not None


def test_a_later_process_with_the_same_number_is_no_supervisor(
    tmp_path: Path, mine: Callable[..., Any]
) -> None:
    mine(supervisor_ticks=mine().supervisor_ticks - 1)
    assert read_state(tmp_path).phase == "failed"


@pytest.mark.parametrize("ago, phase", [(0, "running"), (10, "failed")])
def test_a_state_without_ticks_is_judged_by_seconds_or_a_fresh_heartbeat(
    tmp_path: Path, mine: Callable[..., Any], ago: int, phase: str
) -> None:
    """As versions before wrote it."""
    before = {"supervisor_ticks": None, "pid_space": "", "heartbeat_monotonic": None}
    mine(**before, heartbeat=time.time() - 10)
    assert read_state(tmp_path).phase == "running"
    mine(
        **before,
        supervisor_created=psutil.Process().create_time() - 3600,
        heartbeat=time.time() - ago,
    )
    assert read_state(tmp_path).phase == phase


def test_process_numbers_of_another_boot_are_not_asked(
    tmp_path: Path, mine: Callable[..., Any]
) -> None:
    mine(pid_space="another boot", supervisor_pid=2**22 + 1)
    assert read_state(tmp_path).phase == "running"
    mine(pid_space="another boot", heartbeat=time.time() - 120)
    assert read_state(tmp_path).phase == "failed"


def test_a_supervisor_that_does_not_write_is_told(tmp_path: Path, mine: Callable[..., Any]) -> None:
    mine(heartbeat_monotonic=time.monotonic() - 15)
    state = read_state(tmp_path)
    assert state.phase == "running" and "has not written for 15 s" in state.warning


def test_no_process_is_none() -> None:
    assert not is_process(None, None) and not is_process(2**22 + 1, 5.0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run directory"):
        read_state(tmp_path)


def test_the_first_request_to_stop_holds(tmp_path: Path) -> None:
    assert read_stop(tmp_path) is None
    request_stop(tmp_path, Stop(checkpoint=True, grace_seconds=2))
    request_stop(tmp_path)
    assert read_stop(tmp_path) == Stop(checkpoint=True, grace_seconds=2)
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]
