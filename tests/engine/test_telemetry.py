"""Records arrive whole and in order; a full disk or a bad value costs records, never the run."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from workbench.engine.measure.telemetry_writer import RankLog, TelemetryWriter, write_error


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_in_order(tmp_path: Path) -> None:
    with TelemetryWriter(tmp_path, 3) as telemetry:
        for step in range(200):
            telemetry.record("step", step=step, loss=torch.tensor(1.5), rows=[{"bytes": 2**40}])
    records = lines(tmp_path / "telemetry" / "rank00003.jsonl")
    assert [r["step"] for r in records] == list(range(200))
    assert records[0] == {
        "kind": "step",
        "t": records[0]["t"],
        "step": 0,
        "loss": 1.5,
        "rows": [{"bytes": 2**40}],
    }
    assert abs(float(str(records[-1]["t"])) - time.monotonic()) < 60


def test_one_write_a_record_off_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bytes, int]] = []
    write, release = os.write, threading.Event()

    def slow(descriptor: int, data: bytes) -> int:
        release.wait(10)
        calls.append((data, threading.get_ident()))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    telemetry = TelemetryWriter(tmp_path, 0)
    for step in range(50):
        telemetry.record("step", step=step)
    assert not calls  # the file took none of them yet
    release.set()
    telemetry.close()
    assert len(calls) == 50
    assert all(data.count(b"\n") == 1 and who != threading.get_ident() for data, who in calls)


def test_full_disk_warns_once_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, calls = os.write, 0

    def full(descriptor: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            return write(descriptor, data[:5])
        if calls in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with TelemetryWriter(tmp_path, 0) as telemetry:
        for step in range(6):
            telemetry.record("step", step=step)
    whole = []
    for line in telemetry.path.read_text().splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except ValueError:
            assert line == '{"kin'
    assert whole == [0, 4, 5]
    assert capsys.readouterr().err.count("records are lost") == 1


def test_values_json_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TelemetryWriter(tmp_path, 0) as telemetry:
        telemetry.record(
            "step", loss=float("nan"), rows=[{"seconds": float("inf"), "bytes": 1, "skipped": True}]
        )
        telemetry.record("step", loss=torch.tensor(float("nan")))
        telemetry.record("step", loss=object())
        telemetry.record("bye", step=1)
    records = lines(telemetry.path)
    assert records[0]["loss"] is None
    assert records[0]["rows"] == [{"seconds": None, "bytes": 1, "skipped": True}]
    assert [r["kind"] for r in records] == ["step", "step", "bye"]
    assert "records are lost" in capsys.readouterr().err


def test_rank_log_tees_and_keeps_the_traceback(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from workbench.engine.measure.telemetry_writer "
        "import RankLog\n"
        "with RankLog(Path(sys.argv[1]), 2):\n"
        "    print('to out'); print('to err', file=sys.stderr); raise RuntimeError('the cause')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    log = (tmp_path / "logs" / "rank00002.log").read_text()
    assert done.returncode == 1
    assert "to out" in done.stdout
    assert "to err" in done.stderr
    assert log.startswith("to out\nto err\nTraceback")
    assert log.rstrip().endswith("RuntimeError: the cause")


def test_rank_log_keeps_the_place_of_an_abort(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from workbench.engine.measure.telemetry_writer "
        "import RankLog\n"
        "with RankLog(Path(sys.argv[1]), 0):\n    print('before'); os.abort()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    log = (tmp_path / "logs" / "rank00000.log").read_text()
    assert log.startswith("before\n")
    assert "Fatal Python error: Aborted" in log


def test_rank_log_restores_the_streams(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with RankLog(tmp_path, 0):
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr) == before


def test_a_log_on_a_full_disk_fails_no_rank(tmp_path: Path) -> None:
    """/dev/full refuses what is written to it, and again when it is closed."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank00000.log").symlink_to("/dev/full")
    code = (
        "import os, sys; from pathlib import Path; from workbench.engine.measure.telemetry_writer "
        "import RankLog\n"
        "from workbench.engine.worker import flush\n"
        "with RankLog(Path(sys.argv[1]), 0):\n    print('lost', end='')\n"
        "flush(); os._exit(0)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 0, done.stderr


def test_only_the_first_error_is_kept(tmp_path: Path) -> None:
    try:
        raise RuntimeError("first")
    except RuntimeError as error:
        assert write_error(tmp_path, 1, 7, "B2", error)
    assert not write_error(tmp_path, 1, 8, None, ValueError("second"))
    (path,) = (tmp_path / "errors").iterdir()
    record = json.loads(path.read_text())
    assert path.name == "rank00001.json"
    assert {k: record[k] for k in ("rank", "step", "action", "type", "message")} == {
        "rank": 1,
        "step": 7,
        "action": "B2",
        "type": "RuntimeError",
        "message": "first",
    }
    assert "raise RuntimeError" in record["traceback"]
    assert abs(record["t_epoch"] - time.time()) < 60
