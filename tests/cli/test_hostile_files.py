"""Files that are no files, or that unfold: answered in a moment, and nothing is replaced that must
not be.
"""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench.errors import PlanError
from workbench.safe_io import yaml_files
from workbench.safe_io.files import known_file, replace_file
from workbench.untrusted_text import shown


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"model: *a{levels - 1}"]) + "\n"


def test_aliases_that_unfold_to_millions_are_refused_before_anything_reads_them() -> None:
    with pytest.raises(PlanError, match="more than 100,000 values"):
        yaml_files.parse(bomb(30), "plan.yaml")
    assert yaml_files.parse(bomb(3))["model"][0][0] == ["x"] * 9


def test_more_values_than_a_document_may_hold_are_refused_while_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yaml_files, "MOST_VALUES", 10)
    assert yaml_files.parse("{a: 1, b: 1, c: 1, d: 1, e: 1, f: 1, g: 1, h: 1, i: 1}")["i"] == 1
    monkeypatch.setattr(
        yaml_files, "_more_than", lambda most, value: pytest.fail("all of it was read first")
    )
    for text in ("[1" + ", 1" * 20 + "]", "- 1\n" * 21, "\n".join(f"a{i}: 1" for i in range(11))):
        with pytest.raises(PlanError, match="more than 10 values"):
            yaml_files.parse(text, "plan.yaml")


def test_a_long_document_is_refused_before_it_is_read() -> None:
    with pytest.raises(PlanError, match=r"holds more than 4,194,304 characters"):
        yaml_files.parse("x " * 2**21 + "x", "plan.yaml")


def test_a_value_is_cut_before_it_is_written_out() -> None:
    value: Any = "x"
    for _ in range(40):
        value = [value] * 9
    assert len(shown(value)) <= 60
    assert shown(3) == "3" and shown({"a": [1]}) == "{'a': [1]}"


@pytest.mark.parametrize("file", ["state.json", "calibration"])
def test_a_pipe_is_no_file_to_wait_for(ask: Ask, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "runs" / "odd"
    folder.mkdir(parents=True)
    os.mkfifo(folder / file)
    if file == "state.json":
        code, out, _ = ask("runs", "--root", tmp_path / "runs", "--json")
        assert (code, out.strip()) == (0, "[]")
    else:
        code, _, err = ask(
            "plan",
            "--model",
            "tiny",
            "--gpu",
            "local",
            "--gpus",
            "1",
            "--strategy",
            "single",
            "--set",
            f"cluster.calibration={folder / file}",
        )
        assert code == 2 and "pipe or a device" in err


def test_a_plan_without_end_is_refused(ask: Ask) -> None:
    code, _, err = ask("plan", "/dev/zero")
    assert code == 2 and "holds more than 16,777,216 bytes" in err


def test_a_device_is_written_to_and_a_link_stays_a_link(tmp_path: Path) -> None:
    # A pipe stands for a device: to replace one would be felt by every process of the machine.
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, "page")
    assert os.read(reader, 10) == b"page" and stat.S_ISFIFO(os.stat(pipe).st_mode)
    os.close(reader)
    target.write_text("before")
    link.symlink_to(target)
    replace_file(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    with pytest.raises(OSError):
        known_file(pipe)
