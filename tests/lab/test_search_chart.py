"""The chart of a search, and its result as text and HTML."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.lab import charts
from workbench.planner.search.results import result_tables

from . import synthetic


def test_the_front_is_a_line_and_the_best_are_points() -> None:
    figure = charts.pareto_front(synthetic.found())
    line = [row for row in figure.rows if row.get("front")]
    assert [(row["time"], row["peak"]) for row in line] == [
        (100, 64),
        (120, 16),
        (300, 8),
        (400, 6),
    ]
    assert [row["peak"] for row in figure.rows if row["kind"] == "best by time"] == [64, 16, 32]
    assert (
        "(ms)" in figure.title
        and figure.subtitle == "estimated · 4 of 1,000 plans meet every condition"
    )
    batch = synthetic.found().top[0].plan.training
    assert line[0]["rate"] == pytest.approx(batch.global_batch * batch.sequence_length / 0.1)


def test_the_first_the_knee_and_the_least_memory_are_named_by_their_strategy() -> None:
    named = [row for row in charts.pareto_front(synthetic.found()).rows if ": t" in row["kind"]]
    assert [row["kind"].split(" · ")[0] for row in named] == [
        "first: t1",
        "knee: t2",
        "least memory: t8",
    ]


def test_a_plan_that_is_first_and_smallest_is_named_once() -> None:
    found = synthetic.found()
    one = charts.pareto_front(replace(found, top=found.top[:1], pareto=found.pareto[:1]))
    assert [row["kind"].split(":")[0] for row in one.rows] == [
        "Pareto front",
        "best by time",
        "first",
    ]


def test_gpu_memory_is_a_line_where_it_is_near_and_stated_where_it_is_far() -> None:
    found = synthetic.found()
    assert charts.pareto_front(found).rows[0]["capacity_text"] == "GPU memory: 79.3 GiB"
    small = tuple(replace(one, peak_bytes=2.0**30) for one in found.pareto)
    far = charts.pareto_front(replace(found, top=small[:1], pareto=small))
    assert far.subtitle.endswith("GPU memory: 79.3 GiB") and "capacity" not in far.rows[0]


def test_an_empty_search_says_why_in_place_of_a_chart() -> None:
    figure = charts.pareto_front(synthetic.found(empty="no plan meets 'peak_gib<1'"))
    assert not figure.rows and "peak_gib<1" in figure.static()["title"]["subtitle"]


def test_text_and_html_show_the_same_plans() -> None:
    found = synthetic.found("cost")
    text, page = result_tables.search_result_text(found), result_tables.as_html(found)
    words = (
        "Best by cost (estimated)",
        "100 ms",
        "64.0 GiB",
        "t8 · d1",
        "2,000 a second",
        "4 meet every condition",
    )
    for told in words:
        assert told in text and told in page
    assert text.count("t1 · d8") == 2 and page.count("<tr>") == 3 + 1 + 4 + 1


def test_a_result_without_plans_says_why_and_escapes_it() -> None:
    found = synthetic.found(empty="no plan meets 'peak_gib<1'", feasible=0)
    assert result_tables.search_result_text(found).endswith(
        "no plan meets 'peak_gib<1'"
    ) and "Best" not in result_tables.search_result_text(found)
    assert "peak_gib&lt;1" in result_tables.as_html(
        found
    ) and "<table>" not in result_tables.as_html(found)


@pytest.mark.parametrize("length", [1, 12, 13, 57])
def test_a_long_front_is_thinned_between_its_ends(length: int) -> None:
    front = tuple(replace(synthetic.found().top[0], seconds=float(i)) for i in range(length))
    kept = result_tables.thin_front(front)
    assert len(kept) == min(length, 12) and (kept[0], kept[-1]) == (front[0], front[-1])
    assert [one.seconds for one in kept] == sorted({one.seconds for one in kept})
