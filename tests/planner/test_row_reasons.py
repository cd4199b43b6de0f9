"""What `validate` says of bad input: contradictions, versions and GPUs that nobody measured, and
what would help.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_measured_rows import UNNAMED, cells
from workbench import cli
from workbench.planner.validation import Validation, validate
from workbench.planner.validation.measured_rows import parse_row, read_measured_rows
from workbench.planner.validation.row_consistency import inconsistent
from workbench.planner.validation.row_reasons import NO_REMEDY, published_versions, remedy
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import is_complete, is_complete_moe, row_to_plan

PUBLISHED = Path(__file__).parents[2] / "data/validation/published.csv.gz"
FOUNDRY = {"framework": "LLM Foundry", "zero_stage": "3", "recompute": "full"}


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a user, one of each kind of doubt."""
    rows: list[dict[Any, Any]] = [
        cells(id="plain", **FOUNDRY),
        cells(id="unknown", framework="our own trainer"),
        cells(id="version", framework="InternEvo v9.9"),
        cells(id="later", framework="Megatron-Bridge", table="29.06 NeMo Container / ours"),
        cells(
            id="gpu",
            gpu="V100-SXM2-32GB",
            gpu_mem_gb="32",
            precision="fp16",
            iter_time_s="60",
            **FOUNDRY,
        ),
        cells(id="wide", framework="NeMo", precision="NVFP4"),
        cells(id="status", status="as usual"),
        cells(id="batch", gbs="12"),
        cells(id="shape", layers="", **UNNAMED),
    ]
    rate = {"tflops_kind": "model", "source": "rates", **FOUNDRY}
    rows += [cells(id=f"rate-{n}", tflops_gpu="400", **rate) for n in range(3)]
    rows += [cells(id="rate-off", tflops_gpu="200", **rate)]
    path = tmp_path_factory.mktemp("own") / "own.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def found(own_file: Path) -> Validation:
    return validate([own_file])


def first_rows(found: Validation, words: str) -> list[str]:
    return [
        row
        for one in found.summary()["cautions"]
        if words in one["what"] and one["help"]
        for row in one["first"]
    ]


def test_no_number_stands_without_its_interval(found: Validation) -> None:
    table = found.table
    assert len(table) == 10
    assert ((table.s_low < table.predicted_s) & (table.predicted_s < table.s_high)).all()
    assert ((table.gib_low < table.predicted_gib) & (table.predicted_gib < table.gib_high)).all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("unknown", "name no framework that has a profile (our own trainer)"),
        ("version", "ran InternEvo v9.9, a version that no published row has"),
        ("later", "later than"),
        ("gpu", "ran on v100-sxm2-32gb, of whose generation no clean step was published"),
        ("rate-off", "contradict themselves"),
        ("status", "say a status that is not known ('as usual'): taken as runs"),
    ],
)
def test_what_nobody_measured_is_said(found: Validation, row: str, words: str) -> None:
    assert first_rows(found, words) == [row]


def test_an_ordinary_row_gives_no_caution(found: Validation) -> None:
    assert "plain" not in first_rows(found, "")


def test_an_unknown_framework_has_the_wider_interval(found: Validation) -> None:
    table = found.table.set_index("row")
    wide = table.s_high / table.s_low
    assert wide["unknown"] > wide["plain"]


def test_reasons_come_with_what_would_help(found: Validation) -> None:
    summary = found.summary()
    expected = {"precision fp4", "batch fields contradict", "missing layers"}
    assert set(summary["reasons"]) == set(summary["remedies"]) == expected
    assert "gbs = mbs x dp x grad_accum" in summary["remedies"]["batch fields contradict"]
    assert remedy("something new") == NO_REMEDY


def test_the_command_shows_both(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(["validate", str(own_file)]) == 0
    out = capsys.readouterr().out
    assert "what would help" in out and "Predicted with caution" in out
    assert "dense rows of known model and batch" in out


def test_versions_and_dates_of_the_published_rows() -> None:
    assert "0.2.1" in published_versions()["internevo"][0]
    assert (published_versions()["megatron-bridge"][1] or 0) >= 2026.06


def test_nearly_all_published_rows_of_known_model_and_batch_are_plans() -> None:
    """At least 95 % of dense models and 80 % of mixtures, whatever became of their runs."""
    rows = read_measured_rows(PUBLISHED)
    for known, least, at_least in ((is_complete, 0.95, 4000), (is_complete_moe, 0.8, 100)):
        counted = [row for row in rows if known(row)]
        assert len(counted) >= at_least
        plans = 0
        for row in counted:
            try:
                row_to_plan(row)
                plans += 1
            except Inexpressible:
                continue
        assert plans / len(counted) >= least


def test_rows_of_ones_own_say_that_the_published_fit_predicts_them(
    found: Validation, own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = found.summary()["own_rows"]
    assert (own["rows"], own["predicted_with"]) == (10, "published fit") and own["fitted_constants"]
    assert cli.answer(["validate", str(own_file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Rows of your own: 10, predicted with the published fit of" in said
    assert f"90 % intervals, median: {own['median_half_width']:.1%}" in said


@pytest.mark.parametrize(
    ("column", "text"),
    [("hidden", "-2048"), ("tp", "2.5"), ("n_gpus", "0"), ("layers", "1e30"), ("gbs", "-64")],
)
def test_a_count_that_cannot_be_is_refused_not_taken_for_one(column: str, text: str) -> None:
    row = parse_row(cells(**{column: text}))
    with pytest.raises(Inexpressible, match=f"impossible {column}"):
        row_to_plan(row)
    assert "positive whole number" in remedy(f"impossible {column}")
    for said in ("", "see recipe", "8-16"):
        assert not parse_row(cells(**{column: said})).impossible
    assert not parse_row(cells(vpp="0", ep="0", kv_heads="0")).impossible, "0 says none"


@pytest.mark.parametrize(
    "cell",
    [{"iter_time_s": "0.0005"}, {"tflops_gpu": "5000"}, {"mfu_pct": "150"}, {"tokens_per_s": "1"}],
)
def test_a_row_alone_that_cannot_be_is_suspect(cell: dict[str, str]) -> None:
    plain = {"iter_time_s": "5.0", "tokens_per_s": "", "samples_per_s": "", **FOUNDRY}
    assert not inconsistent([row_to_plan(parse_row(cells(**plain)))]).any()
    assert inconsistent([row_to_plan(parse_row(cells(**plain | cell)))]).all()
