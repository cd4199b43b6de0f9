"""What notebooks share to set a guess beside every source."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.lab import palette, prediction
from workbench.lab.prediction import three_instruments
from workbench.plan.schema import parse_plan
from workbench.profile import Profile, frame
from workbench.runs.launch import checked_launch, subprocess_verbs

from . import synthetic

PLAN = parse_plan("{model: tiny, cluster: {gpu: local, gpus: 2}}")


def three() -> list[Profile]:
    return [synthetic.profile(source) for source in ("estimated", "rehearsed", "measured")]


def test_memory_by_plan_shows_the_rank_with_the_most_beside_the_guess() -> None:
    first, second = three(), [synthetic.profile("estimated", scale=50 * 2**20)]
    figure = prediction.memory_by_plan({"a": first, "b": second}, {"a": 2**28})
    totals = {(row["label"], row["bar"]): row["total"] * 2**20 for row in figure.rows}
    for name, profiles in (("a", first), ("b", second)):
        for profile in profiles:
            largest = max(profile.peak_bytes_by_rank.values())
            assert totals[name, profile.source] == pytest.approx(largest)
    assert totals["a", palette.GUESS] == 2**28 and ("b", palette.GUESS) not in totals
    stacked = sum(r["value"] for r in figure.rows if (r["label"], r["bar"]) == ("a", "measured"))
    assert stacked * 2**20 == pytest.approx(totals["a", "measured"])


def test_memory_by_plan_draws_the_gpus_memory_where_it_is_near() -> None:
    for capacity, drawn in ((2**30, True), (2**40, False)):
        profile = replace(synthetic.profile("estimated"), capacity_bytes=capacity)
        figure = prediction.memory_by_plan({"a": [profile]})
        assert any("capacity" in row for row in figure.rows) == drawn
        assert "GPU memory" not in figure.subtitle


def test_values_by_source_keep_the_order_of_sources() -> None:
    values = {"x": {"published": 4.0, "measured": 2.0, palette.GUESS: 1.0}, "y": {"estimated": 3.0}}
    figure = prediction.values_by_source("Width", "m", values, "a paper")
    assert figure.title == "Width (m)"
    assert figure.subtitle == "your guess · estimated · measured · published · a paper"
    assert {(r["name"], r["source"], r["value"]) for r in figure.rows} == {
        (name, source, value) for name, own in values.items() for source, value in own.items()
    }


def test_bytes_sent_count_rings() -> None:
    calls = [
        ("data", "all_reduce", 4, 1000.0, 2),
        ("data", "reduce_scatter", 4, 1000.0, 1),
        ("pipeline", "send", 2, 300.0, 3),
        ("pipeline", "recv", 2, 300.0, 3),
    ]
    names = ("axis", "kind", "group_size", "bytes", "count")
    rows = [{"rank": 0, "step": 1} | dict(zip(names, call)) for call in calls]
    profile = replace(synthetic.profile("measured"), collectives=frame("collectives", rows))
    assert prediction.bytes_sent(profile, "data") == 2 * 2 * 750 + 750
    assert prediction.bytes_sent(profile) == 3750 + 900


def test_all_three_instruments_see_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated, rehearsed, measured = three()
    seen: list[Any] = []

    def run(phase: str) -> SimpleNamespace:
        state = SimpleNamespace(phase=phase)
        return SimpleNamespace(wait=lambda timeout: state, profile=lambda: measured, cause="killed")

    def rehearse(plan: Any, **_: Any) -> Profile:
        seen.append(plan)
        return rehearsed

    monkeypatch.setattr(three_instruments, "estimate", lambda plan, traced: estimated)
    monkeypatch.setattr(subprocess_verbs, "rehearse", rehearse)
    monkeypatch.setattr(checked_launch, "start", lambda plan, **_: run("finished"))
    assert prediction.all_three(PLAN) == (estimated, rehearsed, measured) and seen == [PLAN]
    monkeypatch.setattr(checked_launch, "start", lambda plan, **_: run("failed"))
    with pytest.raises(RuntimeError, match="killed"):
        prediction.all_three(PLAN)
