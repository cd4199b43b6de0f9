"""Damaged records are left out, counted and told, where they are read: whatever reads a run may
trust the rest.
"""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from workbench.profile import COLUMNS, Profile
from workbench.runs.store import telemetry_reader as reading
from workbench.runs.store.stop_request import GRACE_SECONDS, Stop, read_stop
from workbench.runs.store.telemetry_frames import MeasuredFrames, write_frames
from workbench.runs.store.telemetry_reader import Reader, history

ROWS = {
    "memory": {"stage": 0, "moment": "peak", "tier": "device", "category": "allocated", "bytes": 7},
    "timeline": {"stage": 0, "microbatch": 0, "action": "0F0", "start": 0.0, "end": 0.5},
    "collectives": {
        "axis": "data",
        "kind": "all-reduce",
        "group_size": 2,
        "dtype": "fp32",
        "bytes": 8,
        "count": 1,
        "action": "OPTIMIZER",
        "seconds": None,
    },
}
HELLO = {
    "rank": 0,
    "world_size": 2,
    "local_rank": 0,
    "pid": 7,
    "host": "here",
    "backend": "gloo",
    "device": "cpu",
    "epoch_offset": 0.0,
    "coordinates": {"data": 0},
    "stage": 0,
    "versions": {},
}
STEP = {"step": 0, "loss": 1.0, "seconds": 0.5, "tokens": 8, "bytes": 70}


def sampled(kind: str, /, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, "t": 1.0, "step": 0, "rows": [{**ROWS[kind], **changes}]}


def step(**changes: Any) -> dict[str, Any]:
    return {"kind": "step", "t": 1.0, **STEP, **changes}


SOUND = [
    {"kind": "hello", "t": 0.5, **HELLO},
    *(sampled(kind) for kind in ROWS),
    step(),
    step(step=1, loss=None, bytes=None),
    {"kind": "evaluation", "t": 2.0, "step": 1, "loss": 1.5},
    {"kind": "phase", "t": 2.0, "phase": "done", "step": 1},
    {
        "kind": "checkpoint",
        "t": 3.0,
        "step": 1,
        "path": "/runs/a/checkpoints/step-00000001",
        "seconds": 0.1,
    },
    {"kind": "bye", "t": 3.0, "step": 1},
]
DAMAGED = [
    {"kind": "memory", "t": 1, "step": 1, "rows": 5},
    {"kind": "memory", "t": 1, "step": 1, "rows": ["a"]},
    {"kind": "memory", "t": 1, "step": 1, "rows": {"bytes": 1}},
    {"kind": [1], "t": 1},
    {"kind": None, "t": 1},
    {"t": 1},
    [1],
    5,
    None,
    "step",
    step(t="soon"),
    step(step="x"),
    step(step=None),
    step(step=-1),
    step(step=True),
    step(step=1.5),
    step(step=2**63),
    step(seconds=None),
    step(seconds="long"),
    step(tokens=None),
    step(loss=[1.0]),
    step(bytes={}),
    step(skipped=1),
    step(action=7),
    *(sampled("memory", **{name: None}) for name in ("moment", "tier", "category", "bytes")),
    sampled("memory", category="cache"),
    sampled("memory", bytes=1e300),
    *(sampled("timeline", **{name: None}) for name in ("action", "start", "end")),
    *(
        sampled("collectives", **{name: None})
        for name in ("axis", "kind", "group_size", "bytes", "count")
    ),
    sampled("collectives", seconds="0.1"),
    {"kind": "hello", "t": 1, **HELLO, "pid": "1234"},
    {"kind": "hello", "t": 1, **HELLO, "stage": "first"},
    {"kind": "hello", "t": 1, **HELLO, "coordinates": [0]},
    {"kind": "phase", "t": 1, "phase": 3},
    {"kind": "evaluation", "t": 1, "step": "a", "loss": 1.0},
    {"kind": "evaluation", "t": 1, "step": 1, "loss": "low"},
    {"kind": "checkpoint", "t": 1, "step": "a", "path": "/runs/a"},
    {"kind": "checkpoint", "t": 1, "step": 1, "path": None},
    {"kind": "bye", "t": 1, "step": "last"},
]
MEASURED = COLUMNS.keys() - {"levels"}  # which rehearsals alone have


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "telemetry").mkdir()
    return tmp_path


def write(run: Path, rank: int, *records: Any) -> None:
    lines = (json.dumps(record).encode() + b"\n" for record in records)
    (run / "telemetry" / f"rank{rank:05d}.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize("damaged", DAMAGED, ids=json.dumps)
def test_a_damaged_record_is_left_out_and_told(run: Path, damaged: Any) -> None:
    write(run, 0, *SOUND)
    write(run, 1, *SOUND[:2], damaged, *SOUND[2:], damaged, damaged)
    found = MeasuredFrames("a", 2).read(Reader(run))
    assert found.left_out == ["3 damaged records of rank 1"]
    profile = found.profile()
    assert profile.notes["left_out"] == ["3 damaged records of rank 1"]
    for kind in MEASURED:
        frame = getattr(profile, kind)
        assert len(frame[frame["rank"] == 1]) == len(frame[frame["rank"] == 0]) > 0
    assert (
        profile.peak_bytes_by_rank == {0: 7, 1: 7}
        and profile.step_seconds == 0.5
        and profile.loss == [1.0, None]
    )


def test_sound_records_leave_nothing_out(run: Path) -> None:
    write(run, 0, *SOUND, {"kind": "of a later version", "t": 1, "what": [1]})
    found = MeasuredFrames("a", 1).read(Reader(run))
    assert found.left_out == [] and "left_out" not in found.profile().notes


def test_a_rank_that_the_run_does_not_have_is_not_in_its_frames(run: Path) -> None:
    write(run, 99999, *SOUND)
    assert MeasuredFrames("a", 2).read(Reader(run)).profile().steps.empty


def test_what_cannot_be_read_is_told_and_waited_for_by_nobody(run: Path) -> None:
    (run / "telemetry" / "rank00000.jsonl").mkdir()
    os.mkfifo(run / "telemetry" / "rank00001.jsonl")
    (run / "telemetry" / "rank00002.jsonl").symlink_to("/dev/zero")
    write(run, 3, *SOUND)
    reader = Reader(run)
    assert {record["rank"] for record in reader.poll()} == {3}
    (run / "telemetry" / "rank00003.jsonl").unlink()
    assert reader.poll() == [] and reader.left_out == [
        "telemetry of rank 3: No such file or directory"
    ]


def test_a_line_without_end_is_given_up_and_the_next_one_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONGEST_BYTES", 100_000)
    monkeypatch.setattr(reading, "POLL_BYTES", 70_000)
    file = run / "telemetry" / "rank00000.jsonl"
    file.write_bytes(b"x" * 1_000_000)
    reader = Reader(run)
    for _ in range(40):
        assert reader.poll() == []
    assert len(reader._tails["rank00000.jsonl"].torn) == 0
    with file.open("ab") as stream:
        stream.write(b"x\n" + json.dumps(step()).encode() + b"\n")
    assert [record["step"] for record in reader.poll()] == [0] and reader.damaged == {0: 1}


def test_one_poll_takes_a_part_and_batches_take_all(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "POLL_BYTES", 2 * reading.LEAST_BYTES)
    for rank in range(2):
        write(run, rank, *(step(step=number) for number in range(3000)))
    first = Reader(run).poll()
    assert 0 < len(first) < 2000
    every = [record for batch in Reader(run).batches() for record in batch]
    assert [r["step"] for r in every if r["rank"] == 1] == list(range(3000))


def test_a_long_history_is_thinned_without_losing_peak_first_or_last(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WHOLE_BYTES", 20_000)
    records = []
    for number in range(1000):
        records += [
            sampled("memory", bytes=900 if number == 777 else 7) | {"step": number},
            step(step=number),
        ]
    rare = {"kind": "evaluation", "t": 1.0, "step": 501, "loss": 0.5}
    write(run, 0, *SOUND[:1], *records[:1000], rare, *records[1000:], *SOUND[-2:])
    reader = history(run)
    profile = MeasuredFrames("a", 1).read(reader).profile()
    assert reader.every > 5 and profile.notes["left_out"] == [
        f"{reader.every - 1} of {reader.every} steps"
    ]
    assert len(profile.steps) < 1000 / reader.every + 3
    assert profile.steps.step.tolist()[0] == 0 and profile.steps.step.tolist()[-1] == 999
    assert profile.peak_bytes_by_rank == {0: 900} and profile.notes["evaluation"] == [
        {"step": 501, "loss": 0.5}
    ]
    assert len(profile.notes["checkpoints"]) == 1


def test_kept_frames_have_every_step_though_a_part_at_a_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WHOLE_BYTES", 20_000)
    monkeypatch.setattr(reading, "POLL_BYTES", reading.LEAST_BYTES)
    write(run, 0, *SOUND[:-1], {"kind": "step"}, *(step(step=number) for number in range(2, 2000)))
    write_frames(MeasuredFrames("a", 1), Reader(run), run / "frames")
    kept, whole = Profile.read(run / "frames"), MeasuredFrames("a", 1).read(Reader(run)).profile()
    assert kept.steps.step.tolist() == list(range(2000)) and kept.steps.loss.isna().sum() == 1
    assert kept.notes == whole.notes and kept.notes["left_out"] == ["1 damaged record of rank 0"]
    for kind, names in COLUMNS.items():
        assert tuple(getattr(kept, kind).columns) == names and len(getattr(kept, kind)) == len(
            getattr(whole, kind)
        )


def test_kept_frames_are_what_the_csv_writer_makes_of_the_same_rows(run: Path) -> None:
    odd = 'a,"b"\nc\rd; é'
    steps = [step(step=n, loss=x) for n, x in enumerate((1e-7, 1e16, 0.1 + 0.2, 3, -0.0, None))]
    shared = {"stage": None, "microbatch": 0, "start": 0, "end": 1.5}
    times = [{**shared, "action": text} for text in (odd, "", "None", " ")]
    sums = [{"axis": "data", "kind": odd, "group_size": 1, "bytes": 2**53 - 1, "count": 1.0}]
    write(
        run,
        0,
        *SOUND[:1],
        *steps,
        {"kind": "timeline", "t": 1.0, "step": 1, "rows": times},
        {"kind": "collectives", "t": 1.0, "step": 1, "rows": sums},
    )
    write_frames(MeasuredFrames(odd, 1), Reader(run), run / "frames")
    found = MeasuredFrames(odd, 1)
    rows = [found.rows(records) for records in Reader(run).batches()]
    for kind, names in COLUMNS.items():
        expected = io.StringIO(newline="")
        writer = csv.writer(expected, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([row.get(name) for name in names] for part in rows for row in part[kind])
        assert (run / "frames" / f"{kind}.csv").read_bytes().decode() == expected.getvalue()
        assert expected.getvalue().count("measured") or kind not in MEASURED


@pytest.mark.parametrize(
    ("content", "checkpoint", "grace"),
    [
        (b'{"grace_seconds": "soon"}', False, GRACE_SECONDS),
        (b'{"grace_seconds": null, "checkpoint": true}', True, GRACE_SECONDS),
        (b'{"grace_seconds": -1}', False, GRACE_SECONDS),
        (b'{"grace_seconds": 1e300}', False, GRACE_SECONDS),
        (b'{"grace_seconds": 5, "checkpoint": "yes"}', False, 5.0),
        (b'{"grace_seconds": 5, "unknown": 1}', False, 5.0),
        (b"[5]", False, GRACE_SECONDS),
        (b"5", False, GRACE_SECONDS),
        (b"\xff\x00", False, GRACE_SECONDS),
        (b"", False, GRACE_SECONDS),
    ],
)
def test_a_damaged_request_to_stop_asks_for_the_defaults(
    tmp_path: Path, content: bytes, checkpoint: bool, grace: float
) -> None:
    (tmp_path / "stop").write_bytes(content)
    assert read_stop(tmp_path) == Stop(checkpoint, grace)


def test_a_request_to_stop_that_cannot_be_read_is_one(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    assert read_stop(tmp_path) == Stop()
