"""Planner's verbs under hostile use: devices as output, closed streams, files that are no
measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Ask

SEARCH = ["search", "--model", "gpt2", "--gpu", "h100-sxm-80gb", "--gpus", "2", "--top", "1"]


def test_a_plan_written_to_a_pipe_or_through_a_link_replaces_neither(
    ask: Ask, tmp_path: Path
) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.yaml", tmp_path / "target.yaml"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(target)
    for output in (pipe, link):
        assert ask(*SEARCH, "-o", output)[0] == 0
    assert pipe.is_fifo() and os.read(reader, 1 << 16).startswith(b"model: gpt2")
    os.close(reader)
    assert link.is_symlink() and target.read_text().startswith("model: gpt2")


def test_a_calibration_is_not_measured_for_a_pipe(ask: Ask, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, _, err = ask("calibrate", "-o", tmp_path / "pipe")
    assert code == 2 and "cannot be written; legal: a file" in err and (tmp_path / "pipe").is_fifo()


def test_closed_streams_are_no_traceback_and_do_not_end_in_the_plan(tmp_path: Path) -> None:
    output = tmp_path / "best.yaml"
    command = f'exec "{sys.executable}" -m workbench {" ".join(SEARCH)} -o "{output}" <&- >&-'
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert output.read_text().startswith("model: gpt2") and "estimated" not in output.read_text()


@pytest.mark.parametrize(
    "ranks", ["9" * 5000, "0," * 50_000, ",".join(["9"] * 50_000), "x" * 100_000]
)
def test_a_long_word_of_a_command_line_is_not_said_back_whole(ask: Ask, ranks: str) -> None:
    code, _, err = ask("rehearse", *SEARCH[1:7], "--strategy", "ddp", "--ranks", ranks)
    assert code == 2 and "legal: " in err and len(err) < 3_000
    code, _, err = ask("operators", *SEARCH[1:7], "--strategy", "ddp", "--ranks", ranks)
    assert code == 2 and "legal: " in err and len(err) < 3_000


@pytest.mark.parametrize("verb", ["plan", "import", "attach", "compare"])
def test_what_is_no_text_file_is_told_of_in_plain_words(
    ask: Ask, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    for name in ("binary", ".", "nowhere", "x" * 300):
        code, out, err = ask(verb, f"{tmp_path}/{name}", "--json")
        assert code == 2 and json.loads(out)["exit_code"] == 2
        assert not any(word in err for word in ("codec", "Errno")), err


FIELDS = [
    "cluster.calibration",
    "strategy.pipeline.schedule",
    "corpus.source",
    "model",
    "checkpoint.load",
]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", ["no\\0file.csv", "half\\ud800.csv", "folder"])
def test_a_field_that_names_no_file_is_told_of_in_plain_words(
    ask: Ask, tmp_path: Path, field: str, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    code, out, err = ask(
        "run",
        *SEARCH[1:3],
        "--gpu",
        "local",
        "--gpus",
        "2",
        "--strategy",
        "gpipe",
        "--json",
        "--root",
        tmp_path / "runs",
        "--set",
        f'{field}="{tmp_path}/{name}"',
    )
    assert code == 2 and json.loads(out)["exit_code"] == 2
    assert not any(word in err for word in ("codec", "Errno", "embedded", "internal")), err


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\x89PNG\r\n\x00\xff\x00\n\x01\x02\xfe\n"])
def test_what_is_no_table_of_measurements_is_refused_with_the_columns(
    ask: Ask, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "other.csv").write_bytes(content)
    code, out, err = ask("validate", tmp_path / "other.csv")
    assert code == 2 and out == ""
    assert "other.csv" in err and "model, layers, hidden" in err


def test_a_table_without_a_row_that_can_be_said_shows_the_reason_only(
    ask: Ask, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("model,gpu,layers\nour-own,H100,nan\n")
    code, out, _ = ask("validate", tmp_path / "rows.csv")
    assert code == 0 and "missing layers" in out and "Standing" not in out
