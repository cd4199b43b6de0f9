"""Metrics against numbers worked out by hand, the consistency check, and the verb from file to
answer.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from workbench import cli, verbs
from workbench.errors import PlanError, refuse
from workbench.plan.schema import Plan
from workbench.planner.validation import Prediction, Validation, error_metrics, validate
from workbench.planner.validation.measured_rows import parse_row
from workbench.planner.validation.row_consistency import (
    consistency_ratios,
    inconsistent,
    model_flops_per_step,
)
from workbench.planner.validation.row_to_plan import PlannedRow, row_to_plan

SHAPE = {
    "kind": "measured",
    "framework": "Megatron-LM",
    "model": "small",
    "arch": "gpt dense MHA",
    "layers": "4",
    "hidden": "1024",
    "ffn": "4096",
    "heads": "8",
    "vocab": "32000",
    "seq": "1024",
    "tied_emb": "yes",
    "gated_ffn": "no",
    "gpu": "A100-SXM-80GB",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "mbs": "1",
    "gbs": "64",
    "precision": "bf16",
    "recompute": "none",
    "attn_impl": "flash",
    "mem_unit": "GiB",
    "status": "ok",
}


def cells(**changes: Any) -> dict[Any, Any]:
    return {**SHAPE, **changes}


def said(**changes: Any) -> PlannedRow:
    return row_to_plan(parse_row({**cells(**changes)}))


def test_errors_by_hand() -> None:
    found = error_metrics.relative_errors(
        [110, 80, 100, 103], [100, 100, 100, 100], ["a", "b", "c", "d"]
    )
    assert found["rows"] == 4
    assert found["mape"] == pytest.approx((0.10 + 0.20 + 0 + 0.03) / 4)
    assert found["bias"] == pytest.approx((0.10 - 0.20 + 0 + 0.03) / 4)
    assert found["median_ape"] == pytest.approx((0.10 + 0.03) / 2)
    assert (found["within_5"], found["under_by_5"]) == (0.5, 0.25)
    assert found["worst"] == {"error": pytest.approx(-0.2), "row": "b"}
    assert error_metrics.relative_errors([], []) == {"rows": 0}


def test_spearman_is_scipys_with_ties() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.integers(0, 9, 40), draw.integers(0, 9, 40)
    assert error_metrics.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(error_metrics.spearman([1, 1, 1], [1, 2, 3]))


def test_regret_of_first_and_of_three() -> None:
    predicted, measured = [1.0, 2.0, 3.0, 4.0, 5.0], [30.0, 11.0, 20.0, 10.0, 40.0]
    assert error_metrics.selection_regret(predicted, measured) == pytest.approx(2.0)
    assert error_metrics.selection_regret(predicted, measured, 3) == pytest.approx(0.1)
    assert error_metrics.selection_regret(predicted, measured, 4) == 0


def test_ranking_inside_groups_only() -> None:
    predicted, measured = [1, 2, 3, 4, 5, 9], [10, 20, 30, 40, 50, 1]
    found = error_metrics.ranking_quality(predicted, measured, ["g"] * 5 + ["alone"])
    assert (found["groups"], found["rows"]) == (1, 5)
    assert found["spearman"] == pytest.approx(1)
    assert found["top_1_regret"] == 0
    assert error_metrics.ranking_quality([1.0], [1.0], ["g"]) == {"groups": 0, "rows": 0}


def test_fit_by_status() -> None:
    found = error_metrics.fit_accuracy(
        [70, 90, 70, 90, 90], [80] * 5, ["ran", "ran", "out_of_memory", "out_of_memory", "failed"]
    )
    assert found["ran"] == {"rows": 2, "predicted_to_fit": 0.5}
    assert found["out_of_memory"] == {"rows": 2, "predicted_not_to_fit": 0.5}
    assert found["failed"] == {"rows": 1, "predicted_not_to_fit": 1.0}


def test_coverage_leaves_out_rows_without_an_interval() -> None:
    found = error_metrics.interval_coverage([10, 20, 30], [9, 21, np.nan], [11, 25, np.nan])
    assert found == {"rows": 2, "inside": 0.5, "below_high": 1.0}


def test_one_calibrating_row_takes_away_half_of_a_scale() -> None:
    measured = np.array([10.0, 20.0, 40.0, 5.0, 7.0])
    found = error_metrics.errors_after_calibration(
        measured * [2, 2, 2, 0.5, 0.5], measured, ["a", "a", "a", "b", "b"]
    )
    assert found["rows"] == 5
    assert found["mape"] == pytest.approx((3 * (1 - 0.5**0.5) + 2 * (2**0.5 - 1)) / 5)
    # Of two rows that are 10 % apart, each calibrates the other: 1.1^0.5 - 1 and 1 - 1/1.1.
    assert error_metrics.errors_after_calibration([1.0, 1.1], [1.0, 1.0], ["a", "a"])[
        "mape"
    ] == pytest.approx((1.1**0.5 - 1 + 1 - 1 / 1.1) / 2)


def test_leaving_one_source_out() -> None:
    found = error_metrics.leave_one_group_out([1.0, 1.0, 1.0], [2.0, 2.0, 1.0], ["a", "b", "c"])
    assert found["by_group"] == {
        "a": pytest.approx(0.25),
        "b": pytest.approx(0.25),
        "c": pytest.approx(1.0),
    }
    assert error_metrics.leave_one_group_out([1.0], [1.0], ["a"]) == {"groups": 1}


def test_flops_are_six_a_weight_and_token() -> None:
    plan = said(iter_time_s="1").plan
    block = 12 * 1024**2
    tokens = 64 * 1024
    attention = 12 * 4 * 1024 * 1024 * tokens
    assert model_flops_per_step(plan, causal=False) == pytest.approx(
        6 * (4 * block + 32000 * 1024) * tokens + attention
    )
    assert model_flops_per_step(plan) == pytest.approx(
        model_flops_per_step(plan, causal=False) - attention / 2
    )
    assert model_flops_per_step(plan, counted="twice") - model_flops_per_step(
        plan
    ) == pytest.approx(6 * 32000 * 1024 * tokens)
    assert model_flops_per_step(plan, counted="held") == model_flops_per_step(plan), (
        "tied weights of one stage are held once"
    )


def consistent(seconds: float, **changes: Any) -> PlannedRow:
    """A row whose printed rate follows from its time."""
    done = model_flops_per_step(said(**changes).plan, causal=False) / (seconds * 8 * 1e12)
    return said(iter_time_s=str(seconds), tflops_gpu=f"{done:.6f}", **changes)


def test_a_row_that_contradicts_its_own_rate_is_suspect() -> None:
    rows = [
        consistent(t, seq=length)
        for t, length in ((1.0, "1024"), (1.3, "512"), (2.0, "1024"), (1.7, "512"))
    ]
    wrong = said(iter_time_s="1.0", tflops_gpu=str((rows[0].row.tflops or 0) / 3))
    assert inconsistent([*rows, wrong]).tolist() == [False] * 4 + [True]
    assert consistency_ratios([*rows, wrong])[:4] == pytest.approx(1)
    assert not inconsistent([wrong]).any(), "one row of a source says nothing"


def test_recomputation_in_hardware_rates_is_no_contradiction() -> None:
    def hardware(seconds: float, recompute: str) -> PlannedRow:
        done = (
            model_flops_per_step(said().plan, causal=False)
            * (4 / 3 if recompute == "full" else 1)
            / (seconds * 8e12)
        )
        return said(
            iter_time_s=str(seconds),
            tflops_gpu=f"{done:.6f}",
            tflops_kind="hardware",
            recompute=recompute,
        )

    assert not inconsistent(
        [hardware(t, how) for t in (1.0, 2.0, 3.0) for how in ("none", "full")]
    ).any()


Table = Callable[..., Path]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    def write(*rows: dict[str, str]) -> Path:
        names = sorted({name for one in rows for name in one})
        path = tmp_path / "measured.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def stub(plan: Plan) -> Prediction:
    """30 GiB, and a second for 64 sequences; refuses two GPUs."""
    if plan.world_size == 2:
        raise refuse("cluster.gpus", "is 2")
    return Prediction(
        peak_gib=30.0,
        seconds=plan.training.global_batch / 64,
        peak_low=27.0,
        peak_high=36.0,
        seconds_low=0.9,
        seconds_high=1.1,
        parts={"compute s": 1.0},
    )


def measured(table: Table) -> Validation:
    rows = [
        cells(id="a", iter_time_s="1.25", mem_gib="24", mem_kind="torch max allocated"),
        cells(id="b", iter_time_s="0.8", gbs="128", mem_gib="40", mem_kind="not stated"),
        cells(id="c", status="OOM"),
        cells(id="d", status="failed (OOM or crash)", iter_time_s="9", mem_gib="9"),
        cells(id="e", layers=""),
        cells(id="f", n_gpus="2"),
    ]
    return validate([table(*rows)], predict=stub)


def test_from_file_to_answer(table: Table) -> None:
    found = measured(table).summary()
    assert (found["rows"], found["expressed"], found["predicted"]) == (6, 5, 4)
    assert found["reasons"] == {"missing layers": 1}
    assert found["refused_by_planner"] == {"cluster.gpus": 1}
    assert found["coverage"] == 1.0
    assert found["memory"]["allocated"]["mape"] == pytest.approx(0.25)
    assert found["memory"]["unknown"]["bias"] == pytest.approx(-0.25)
    assert found["memory"]["allocated"]["interval"] == {"rows": 1, "inside": 0.0, "below_high": 1.0}
    assert found["time"]["rows"] == 2
    assert found["time"]["bias"] == pytest.approx(((1 / 1.25 - 1) + (2 / 0.8 - 1)) / 2)
    assert found["fit"]["ran"] == {"rows": 2, "predicted_to_fit": 1.0}
    assert found["fit"]["out_of_memory"]["predicted_not_to_fit"] == 0.0
    assert found["by_profile"]["megatron"]["rows"] == 4


def test_rows_written_hold_prediction_measurement_and_parts(table: Table, tmp_path: Path) -> None:
    written = measured(table).dump(tmp_path / "rows.csv")
    with written.open() as file:
        rows = list(csv.DictReader(file))
    assert [one["row"] for one in rows] == ["a", "b", "c", "d"]
    assert (rows[0]["predicted_gib"], rows[0]["measured_gib"], rows[0]["memory_ratio"]) == (
        "30",
        "24",
        "1.25",
    )
    assert rows[0]["compute s"] == "1"
    assert rows[3]["measured_s"] == "", "a failed row has no time"


def test_equal_plans_are_predicted_once(table: Table) -> None:
    asked = []

    def count(plan: Plan) -> Prediction:
        asked.append(plan)
        return stub(plan)

    validate([table(cells(id="a"), cells(id="b"), cells(id="c", gbs="8"))], predict=count)
    assert len(asked) == 2


def test_one_profile_for_all_rows(table: Table) -> None:
    profiles = set()

    def note(plan: Plan) -> Prediction:
        profiles.add((plan.strategy.stack, plan.strategy.gradient_dtype))
        return stub(plan)

    found = validate([table(cells(id="a", mem_gib="30"))], predict=note, profile="textbook")
    assert profiles == {("textbook", "fp32")}, (
        "the row's own framework still says what the row leaves open"
    )
    assert list(found.summary()["by_profile"]) == ["megatron"]


def test_tables_say_framework_profile(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    file = str(table(cells(id="a", iter_time_s="2")))
    assert cli.answer(["validate", file, "--rows", str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "By framework profile" in shown and "stack" not in shown.lower()
    names = rows.read_text().splitlines()[0].split(",")
    assert {"profile", "predicted_with"} <= set(names) and "stack" not in names


def test_a_file_of_other_columns_counts_nothing_beside_measurements_and_is_refused_alone(
    table: Table,
) -> None:
    other = table({"collective": "AllReduce", "gbs": "1"})
    with pytest.raises(PlanError, match="has none of the columns of measurements"):
        validate([other], predict=stub)
    assert cli.answer(["validate", str(other), "--by", "profile"]) == 2
    copy = other.rename(other.with_name("other.csv"))
    found = validate([copy, table(cells(id="a", mem_gib="30"))], predict=stub).summary()
    assert (found["rows"], found["expressed"]) == (2, 1)
    json.dumps(found)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.answer(["validate", *words])
    return code, capsys.readouterr().out


def test_the_command(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(cells(id="a", iter_time_s="1", mem_gib="20", mem_kind="allocated"))
    code, out = answer(
        capsys, str(path), "--by", "gpu", "--rows", str(tmp_path / "rows.csv"), "--json"
    )
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert found["memory"]["allocated"]["rows"] == found["time"]["rows"] == 1
    assert found["by"]["gpu"]["A100-SXM-80GB"]["rows"] == 1
    assert (tmp_path / "rows.csv").is_file()
    code, out = answer(capsys, str(path))
    assert code == 0
    assert "1 rows, 1 expressed as plans" in out
    assert verbs.validate(path).rows == 1


@pytest.mark.parametrize(
    "words",
    [
        ("nowhere.csv",),
        ("--by", "colour", "nowhere.csv"),
        ("--profile", "nothing", "nowhere.csv"),
        (),
    ],
)
def test_the_command_says_what_is_wrong(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.answer(["validate", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
