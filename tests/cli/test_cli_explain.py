"""`workbench explain` and the verb: one answer for people, machines and notebooks."""

from __future__ import annotations

import json

import pytest

import workbench as wb
from workbench.cli import answer
from workbench.units import interval_text

PLAN = ["--model", "llama-3-8b", "--gpu", "a100-sxm-80gb", "--gpus", "8", "--strategy", "zero-2"]


def test_tables_say_cost_constraint_sensitivity_and_neighbours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["explain", *PLAN]) == 0
    out = capsys.readouterr().out
    for words in (
        "cost (estimated)",
        "a GPU-hour",
        "kWh",
        "Memory:",
        "Time:",
        "Sensitivity (estimated)",
        "Neighbours",
    ):
        assert words in out


def test_json_is_the_verbs_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["explain", *PLAN, "--tokens", "2e12", "--price", "1.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = wb.Plan.of("llama-3-8b", gpu="a100-sxm-80gb", gpus=8, strategy="zero-2")
    assert data == json.loads(json.dumps(wb.explain(plan, tokens=2e12, price=1.5).to_json()))
    assert data["cost"]["dollars"] == pytest.approx(1.5 * data["cost"]["gpu_hours"])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tokens", "0"), ("--price", "-1"), ("--rehearse", "0"), ("--rehearse", "inf")],
)
def test_numbers_that_cannot_be_meant_are_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["explain", *PLAN, flag, value, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["field"].strip("-") == flag.strip("-")


def test_the_step_time_has_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    plan = wb.Plan.of("llama-3-8b", gpu="a100-sxm-80gb", gpus=8, strategy="zero-2")
    found, ends = wb.explain(plan), wb.estimate(plan).step_interval
    assert ends and found.to_json()["step_seconds_90"] == list(ends)
    assert f"90 % interval {interval_text(ends)}" in found.step_line
    assert answer(["explain", *PLAN]) == 0
    printed = capsys.readouterr().out
    assert all(found.step_line in " ".join(text.split()) for text in (printed, repr(found)))
    assert found.step_line in found._repr_html_()


def test_further_tables_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["explain", *PLAN, "--without-each", "--placements"]) == 0
    out = capsys.readouterr().out
    assert "Without each dimension" in out and "sharding (ZeRO-2)" in out
    assert "Placement: orders of the axes, best first (estimated)" in out and "Network: " in out
    assert answer(["explain", *PLAN, "--without-each", "--placements", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = wb.Plan.of("llama-3-8b", gpu="a100-sxm-80gb", gpus=8, strategy="zero-2")
    found = wb.explain(plan, without_each=True, placements=True)
    assert data == json.loads(json.dumps(found.to_json()))


@pytest.mark.slow
def test_what_is_taken_away_is_rehearsed_within_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = ["--model", "tiny", "--gpu", "local", "--gpus", "2", "--strategy", "zero-1"]
    assert answer(["explain", *tiny, "--rehearse", "600", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["without_each"]:
        own = row["rehearsed_allocated_bytes"]
        assert own == pytest.approx(row["allocated_bytes"], rel=0.02)
    assert answer(["explain", *tiny, "--rehearse", "0.01", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["without_each"]:
        assert row["rehearsed_allocated_bytes"] is None and "was not done in 0.01 s" in row["note"]
