"""`workbench calibrate`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.costmodel.test_calibrated import made
from workbench import cli
from workbench.machine import calibration_file
from workbench.machine.calibration_file import Calibration, Scale
from workbench.runs.measure import calibrate as measure


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is measured at once."""

    def calibrate(seconds: float, progress: Any) -> Calibration:
        progress(seconds, seconds, "2 ranks at once")
        return made()

    monkeypatch.setattr(measure, "calibrate", calibrate)


def test_the_file_and_its_figures_by_ranks(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    assert cli.answer(["calibrate", "-o", str(path), "--seconds", "5", "--json"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert calibration_file.read_calibration(path) == made() and "5 of 5 s" in said.err
    assert (
        answer["path"] == str(path) and answer["source"] == "measured" and answer["scale"] is None
    )
    assert [row["ranks"] for row in answer["ranks"]] == [1, 2]
    two = answer["ranks"][1]
    assert two["gflops"] == pytest.approx({"fp32": 40.0}) and two["memory_gbs"] == pytest.approx(
        5.0
    )
    assert two["collectives"]["all_reduce"] == pytest.approx(
        {"alpha_us": 400.0, "beta_gbs": 0.5}, rel=1e-6
    )


def test_people_see_a_table_and_how_to_use_it(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    assert cli.answer(["calibrate", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert "measured 2026-01-01" in text and "80 GFLOP/s" in text and "400 us, 0.50 GB/s" in text
    assert f"--set cluster.calibration={path}" in text


def test_a_corrected_calibration_shows_the_error_before_and_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = Scale(
        compute=2.0, communication=2.0, runs=["one"], error_before=0.5, error_after=0.01
    )
    monkeypatch.setattr(measure, "calibrate_file", lambda *_: made(scale=learned))
    assert cli.answer(["calibrate", "-o", str(tmp_path / "machine.yaml")]) == 0
    text = capsys.readouterr().out
    assert "fitted to one: compute x 2.000" in text and "50.0% before, 1.0% after" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "nan"], "legal: 1 to 3600"),
        (["--from", "nothing"], "no run directory"),
        (["-o", "no/where"], "folder"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.answer(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
