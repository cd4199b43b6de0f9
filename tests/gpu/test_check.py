"""The runner of the GPU checks: budget, resuming, counting, crashes, hangs, the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import planted_part
from tests.gpu.check import PARTS, SEVERAL_GPUS, main
from tests.gpu.checks import Check
from tests.gpu.parts import kernels
from tests.gpu.supervise import checks_of

PLANTED = planted_part.__name__


def run(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a dry run of the planted part."""
    code = main(["--dry", "--json", str(path), *words], parts=(PLANTED,))
    document: dict[str, Any] = json.loads(path.read_text())
    return code, document


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {result["check"]: result["status"] for result in document["checks"]}


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave only some of the planted checks."""
    chosen = [check for check in planted_part.CHECKS if check.name in names]
    monkeypatch.setattr(planted_part, "CHECKS", chosen)


def test_a_crash_or_a_hang_loses_one_check(tmp_path: Path) -> None:
    code, document = run(tmp_path / "answer.json")
    found = statuses(document)
    assert code == 1
    assert [name for name, status in found.items() if status == "passed"] == ["passes", "writes"]
    errors = {result["check"]: result["error"] for result in document["checks"]}
    assert "on purpose" in errors["raises"] and "SIGKILL" in errors["crashes"]
    assert "deadline of 0.3 s" in errors["hangs"]
    assert document["counts"]["failed"] == 4


def test_assertions_are_counted_and_the_missing_ones_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(monkeypatch, "passes")
    code, document = run(tmp_path / "answer.json")
    counts = document["counts"]
    assert (counts["assertions_evaluated"], counts["assertions_not_evaluated"]) == (2, 1)
    assert code == 0 and counts["evaluated_share"] == pytest.approx(2 / 3, abs=1e-3)
    said = capsys.readouterr().out
    assert "not evaluated, a CPU is none:" in said and "passes: three" in said


def test_one_check_may_be_named(tmp_path: Path) -> None:
    code, document = run(tmp_path / "answer.json", "--only", "planted_part:writes")
    assert (code, statuses(document)) == (0, {"writes": "passed"})


def test_one_failing_check_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, "passes", "writes")
    assert run(tmp_path / "good.json")[0] == 0
    monkeypatch.undo()
    keep(monkeypatch, "passes", "fails")
    code, document = run(tmp_path / "bad.json")
    assert code == 1 and document["counts"]["assertions_failed"] == 1


def test_a_spent_budget_leaves_a_whole_document_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "passes", "writes")
    runs = tmp_path / "runs"
    monkeypatch.setenv("PLANTED_RUNS", str(runs))
    code, document = run(tmp_path / "answer.json", "--budget", "0")
    assert (code, document["counts"]["not_reached"]) == (0, 2) and not runs.exists()
    assert document["device"] == "cpu" and document["versions"]["torch"] and document["date"]
    resume = ("--resume", str(tmp_path / "answer.json"))
    _, document = run(tmp_path / "answer.json", *resume)
    assert set(statuses(document).values()) == {"passed"}
    _, document = run(tmp_path / "answer.json", *resume)
    assert document["counts"]["passed"] == 2 and runs.read_text() == "x", "a passed check ran twice"


def test_the_budget_ends_a_check_without_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Check("hangs", planted_part.hangs, 60)
    monkeypatch.setattr(planted_part, "CHECKS", [hanging])
    code, document = run(tmp_path / "answer.json", "--budget", "0.5")
    assert (code, statuses(document)) == (0, {"hangs": "not reached"})


def test_another_devices_document_is_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(monkeypatch, "passes")
    run(tmp_path / "answer.json")
    document = json.loads((tmp_path / "answer.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(document | {"device": "NVIDIA H100"}))
    words = [
        "--dry",
        "--json",
        str(tmp_path / "new.json"),
        "--resume",
        str(tmp_path / "other.json"),
    ]
    assert main(words, parts=(PLANTED,)) == 2
    assert "its device is 'NVIDIA H100', here it is 'cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_sha256": "0" * 16}, "its source_sha256 is '0000000000000000'"),
        ({"format": 99}, "its format is 99"),
        ({"gpus": 4}, "its gpus is 4"),
        ({"checks": 7}, "is no document of these checks"),
        ({"checks": [7]}, "--resume: "),
    ],
)
def test_what_other_code_or_a_damaged_file_says_is_no_start(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(monkeypatch, "passes")
    former = tmp_path / "answer.json"
    run(former)
    former.write_text(json.dumps(json.loads(former.read_text()) | changes))
    assert main(["--dry", "--json", str(former), "--resume", str(former)], parts=(PLANTED,)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "nonsense"], "--only is 'nonsense'; legal: planted_part"),
        (["--only", "planted_part:none"], "--only is 'planted_part:none'; legal: passes, fails"),
        (["--budget", "-5"], "--budget is -5; legal: 0 seconds or more"),
        (["--json", "GPUS"], "holds a run on GPUs, which would be lost; legal: --resume"),
    ],
)
def test_usage_is_refused_and_loses_nothing(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = tmp_path / "gpus.json"
    gpus.write_text('{"dry": false}')
    given = [str(gpus) if word == "GPUS" else word for word in options]
    with pytest.raises(SystemExit) as refused:
        main(["--dry", *given], parts=(PLANTED,))
    assert refused.value.code == 2 and words in capsys.readouterr().err
    assert gpus.read_text() == '{"dry": false}'


def test_checks_have_names_of_their_own() -> None:
    for part in (*PARTS, SEVERAL_GPUS):
        names = [check.name for check in checks_of(part)]
        assert len(set(names)) == len(names), part


def test_every_operator_has_a_check() -> None:
    from tests.kernels import test_gpu

    assert set(kernels.OPERATORS) == set(test_gpu.OPERATORS)
