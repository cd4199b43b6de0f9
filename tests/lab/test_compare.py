import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from workbench.lab.comparison.compare import Comparison, compare
from workbench.lab.comparison.report import plan_files
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.runs.run import Run
from workbench.runs.store.run_state import first_state
from workbench.units import count_text, interval_text

from . import fake_run, synthetic


def three(run: str = "plan", world: int = 2) -> list[Any]:
    sources = ("estimated", "rehearsed", "measured")
    return [
        synthetic.profile(
            s,
            world,
            run=run if s != "measured" else f"{run}-run",
            steps=10 if s == "measured" else 0,
        )
        for s in sources
    ]


def test_one_row_a_rank_with_the_measured_run_and_step() -> None:
    frame = compare(three()).frame
    assert (
        list(frame["rank"]) == [0, 1] and set(frame.run) == {"plan-run"} and set(frame.step) == {2}
    )
    row = frame.iloc[0]
    assert row.estimated_bytes < row.rehearsed_bytes < row.measured_bytes
    assert row.estimated_error == pytest.approx(
        (row.estimated_bytes - row.measured_bytes) / row.measured_bytes
    )


def test_profiles_in_a_row_belong_together_until_a_source_comes_again() -> None:
    assert [entry.name for entry in compare(*three("a"), *three("b")).entries] == ["a", "b"]
    assert len(compare(*three("a"), *three("b")).frame) == 4


def test_equal_names_are_numbered() -> None:
    assert [entry.name for entry in compare(three(), three()).entries] == ["plan (1)", "plan (2)"]


def test_what_was_not_measured_is_a_dash_not_a_number() -> None:
    comparison = compare(synthetic.profile("estimated", 1))
    assert (
        comparison.frame.measured_bytes.isna().all()
        and comparison.to_json()["memory"][0]["measured_bytes"] is None
    )
    assert "–" in comparison._repr_html_() and "nan" not in comparison._repr_html_().lower()
    assert "–" in repr(comparison)


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        compare()


def test_a_report_is_one_page_without_scripts_or_addresses(tmp_path: Path) -> None:
    text = compare(three("a"), three("b")).to_html(tmp_path / "report.html").read_text()
    assert text.count("<svg") >= 8 and "<script" not in text
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"(src|href)=[\"'](?!#)", text)
    assert "a-run" in text and "estimated − measured" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


def test_a_report_that_does_not_fit_on_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    comparison = compare(synthetic.profile("estimated", 1))
    monkeypatch.setattr("workbench.safe_io.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        comparison.to_html(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_long_names_and_ids_wrap_uncut_and_a_wide_table_scrolls_by_itself(tmp_path: Path) -> None:
    name = "a-name-of-many-words-" * 4
    text = compare(three(name)).to_html(tmp_path / "report.html").read_text()
    assert set(re.findall(rf'<td class="([\w-]+)">{name}</td>', text)) == {"wb-name"}
    assert set(re.findall(rf'<td class="([\w-]+)">{name}-run</td>', text)) == {"wb-id"}
    for kind in ("name", "id"):
        assert re.search(rf"\.wb-{kind} \{{[^}}]*white-space: normal", text)
    assert ".wb-table td { white-space: nowrap; }" in text
    assert (
        len(re.findall(r'<div class="scroll">\s*<style>[^<]*</style>\s*<table', text))
        == text.count("<table")
        == 2
    )


def sharded(**changes: Any) -> Plan:
    return Plan.of(
        "tiny", gpu="a100-sxm-80gb", gpus=4, strategy="zero-1", set={"name": "zero-1", **changes}
    )


def test_plans_of_one_name_are_listed_with_the_fields_that_differ(tmp_path: Path) -> None:
    accumulated = {
        "training.global_batch": 64,
        "strategy.tensor.sequence": True,
        "strategy.tensor.size": 2,
    }
    comparison = compare(sharded(), sharded(**accumulated), synthetic.profile("estimated", 1))
    assert comparison.to_json()["differences"] == {
        "strategy.tensor.size": {"zero-1 (1)": 1, "zero-1 (2)": 2},
        "strategy.tensor.sequence": {"zero-1 (1)": False, "zero-1 (2)": True},
        "training.global_batch": {"zero-1 (1)": 16, "zero-1 (2)": 64},
    }
    page = comparison.to_html(tmp_path / "report.html").read_text()
    for shown in (page, comparison._repr_html_()):
        assert '<th scope="col" class="wb-name">zero-1 (2)</th>' in shown
        assert (
            '<td class="wb-name">strategy.tensor.sequence</td><td class="wb-name">false</td>'
            in shown
        )
    rows = repr(comparison).split("Plan fields that differ\n")[1].splitlines()[:4]
    assert [row.split() for row in rows] == [
        ["field", "zero-1", "(1)", "zero-1", "(2)"],
        ["strategy.tensor.size", "1", "2"],
        ["strategy.tensor.sequence", "false", "true"],
        ["training.global_batch", "16", "64"],
    ]


@pytest.mark.parametrize("plans", [[sharded()], [sharded(), sharded()]])
def test_equal_plans_have_no_table_of_differences(plans: list[Plan]) -> None:
    comparison = compare(*plans)
    assert (
        comparison.to_json()["differences"] == {}
        and "differ" not in repr(comparison) + comparison._repr_html_()
    )


def test_names_cannot_inject_markup(tmp_path: Path) -> None:
    comparison = compare(synthetic.profile("estimated", 1, run="<script>x</script>"))
    text = comparison.to_html(tmp_path / "r.html").read_text()
    assert "<script>" not in text


def test_escapes_and_bidirectional_marks_reach_no_page_and_no_chart() -> None:
    comparison = compare(three("a\x1b[31m\u202ebc"))
    shown = (
        comparison._repr_html_()
        + plan_files(comparison.entries)
        + "".join(str(f.static()) for f in comparison.figures())
    )
    assert "a[31mbc" in shown and not set(shown) & {"\x1b", "\u202e"} and "\\x1b" not in shown


def test_a_table_shows_the_extremes_of_many_ranks_and_the_frame_all() -> None:
    comparison = compare(synthetic.profile("estimated", 64))
    assert len(comparison.frame) == 64 and "10 of 64 rows" in repr(comparison)
    assert comparison._repr_html_().count("<tr>") < 20


def test_estimates_of_equal_plans_have_a_bar_each() -> None:
    figures = compare(synthetic.profile("estimated"), synthetic.profile("estimated")).figures()
    rows = next(figure for figure in figures if figure.name == "parts").rows
    assert {row["bar"] for row in rows} == {"estimated · plan (1)", "estimated · plan (2)"}


@pytest.mark.parametrize(
    ("phase", "done", "says"),
    [
        ("finished", 3, "finished"),
        ("failed", 3, "failed after step 3"),
        ("stopped", 2, "stopped after step 2"),
        ("failed", 0, "failed before step 1"),
        ("running", 1, "running"),
    ],
)
def test_a_run_says_how_it_ended_wherever_it_is_shown(
    tmp_path: Path, phase: str, done: int, says: str
) -> None:
    folder = fake_run.make(tmp_path / "20261121-a-run")
    fake_run.hello(folder, 2)
    for number in range(done):
        fake_run.step(folder, 2, number)
    fake_run.put_state(folder, first_state(2, 20), phase=phase)
    comparison = compare(Run(folder))
    found = {row["source"]: row["state"] for row in comparison.to_json()["summary"]}
    assert found == {"estimated": None, "measured": says}
    stands_in_its_row(comparison, "measured", says)


def stands_in_its_row(comparison: Comparison, source: str, says: str) -> None:
    """The state stands once, in the row of what it is of."""
    rows = [line for line in repr(comparison).splitlines() if f"  {says}  " in line]
    assert len(rows) == 1 and f" {source} " in rows[0]
    assert comparison._repr_html_().count(f">{says}</td>") == 1


def test_a_run_says_how_it_ended_where_only_its_profiles_are_compared(tmp_path: Path) -> None:
    folder = fake_run.make(tmp_path / "20261121-a-run")
    fake_run.hello(folder, 2)
    fake_run.step(folder, 2, 0)
    fake_run.put_state(folder, first_state(2, 20), phase="stopped")
    estimate, measured = synthetic.profile("estimated", 2), Run(folder).profile()
    stands_in_its_row(compare(estimate, measured), "measured", "stopped after step 1")
    shutil.rmtree(folder)
    assert compare(estimate, measured).to_json()["summary"][1]["state"] is None


def test_runs_of_which_only_profiles_are_compared_say_how_their_plans_differ(
    tmp_path: Path,
) -> None:
    profiles = []
    for number, (world, steps) in enumerate([(2, 20), (4, 20), (2, 30)]):
        folder = fake_run.make(tmp_path / f"2026112{number}-a-run", world, steps)
        fake_run.put_state(folder, first_state(world, steps))
        profiles.append(Run(folder).profile())
    found = compare(*profiles).to_json()["differences"]
    assert list(found["training.steps"].values()) == [20, 20, 30]
    assert list(found["cluster.gpus"].values()) == [2, 4, 2]
    shutil.rmtree(tmp_path / "20261121-a-run")
    assert list(compare(*profiles).to_json()["differences"]) == ["training.steps"]


def test_a_plan_without_a_run_has_the_state_not_run() -> None:
    stands_in_its_row(compare(sharded()), "estimated", "not run")


def test_an_estimated_step_time_has_its_interval() -> None:
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp")
    profile = estimate(plan)
    comparison = compare(profile, three())
    ends = profile.step_interval
    assert ends and comparison.to_json()["summary"][0]["step_seconds_90"] == ends
    assert f"<td>{interval_text(ends)}</td>" in comparison._repr_html_()
    assert "90 % interval" not in compare(three())._repr_html_(), "no interval is known"


def test_plans_of_different_batches_are_compared_by_tokens() -> None:
    def plan(batch: int) -> Plan:
        changes = {"training.global_batch": batch, "name": f"batch-{batch}"}
        return Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="ddp", set=changes)

    comparison = compare(plan(8), plan(64))
    words = "global batches differ: compare tokens/s"
    figure = next(figure for figure in comparison.figures() if figure.name == "parts")
    assert figure.title.startswith("Time of a million tokens by part") and words in figure.subtitle
    for entry in comparison.entries:
        (row,) = (r for r in figure.rows if r["text"] and entry.name in r["bar"])
        rate = entry.profiles[0].tokens_per_second
        assert rate and row["text"] == f"{count_text(rate)} tokens/s"
    for shown in (repr(comparison), comparison._repr_html_()):
        assert words in shown
    same = compare(plan(8), plan(8))
    assert words not in repr(same) and next(iter(same.figures())).title.startswith("Step time")


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        (({"strategy.data.zero": 1}, {"strategy.data.zero": 2}), ["zero 1", "zero 2"]),
        (({}, {"training.micro_batch": 2}), ["micro_batch 1", "micro_batch 2"]),
        (({}, {"name": "another"}), ["zero-1", "another"]),
        (
            ({}, {"strategy.tensor.size": 2}, {"training.micro_batch": 2}),
            ["tensor 1, micro_batch 1", "tensor 2, micro_batch 1", "tensor 1, micro_batch 2"],
        ),
        (({}, {}), ["zero-1 (1)", "zero-1 (2)"]),
    ],
)
def test_charts_call_plans_by_what_differs(
    changes: tuple[dict[str, Any], ...], labels: list[str]
) -> None:
    figures = compare(*(sharded(**each) for each in changes)).figures()
    bars = next(figure for figure in figures if figure.name == "parts").rows
    assert list(dict.fromkeys(row["bar"] for row in bars)) == [f"estimated · {x}" for x in labels]
    titles = [figure.title for figure in figures if "Peak memory by rank" in figure.title]
    assert [title.split(":")[0] for title in titles] == labels
