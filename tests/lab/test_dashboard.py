import threading
import time
from pathlib import Path

import pytest

from workbench.lab.charts import step_time_parts
from workbench.lab.comparison.compare import compare
from workbench.lab.live.dashboard import Dashboard, watch
from workbench.lab.live.figure import VEGA_MIME
from workbench.runs.run import Run
from workbench.runs.store import telemetry_reader
from workbench.runs.store.run_state import first_state

from . import fake_run, synthetic


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_run.make(tmp_path / "20260101-000000-tiny", world=2, steps=12)


def play(folder: Path, steps: int = 12, seconds: float = 0.02) -> threading.Thread:
    thread = threading.Thread(target=fake_run.play, args=(folder, 2, steps, seconds), daemon=True)
    thread.start()
    return thread


def test_a_run_is_followed_to_its_end(folder: Path) -> None:
    play(folder)
    dashboard = watch(Run(folder), [synthetic.profile("estimated", 2, scale=20 * 2**20)])
    assert dashboard.wait(20)
    assert (
        dashboard.board.banner["headline"] == "Finished: 12 steps"
        and dashboard.board.banner["tone"] == "good"
    )
    assert len([row for row in dashboard.board.rows("loss") if row["text"] == "training"]) == 12
    assert len(dashboard.board.rows("throughput")) == 24 and len(
        dashboard.board.rows("memory_steps")
    ) == 4 + len(["estimated"])
    assert {row["source"] for row in dashboard.board.rows("memory")} == {"estimated", "measured"}
    assert {row["lane"] for row in dashboard.board.rows("timeline")} == {
        "rank 0 · stage 0",
        "rank 1 · stage 1",
    }
    assert dashboard.board.banner["buttons"] == []


def test_the_snapshot_holds_the_whole_run_and_no_widget(folder: Path) -> None:
    play(folder)
    dashboard = watch(Run(folder), [])
    assert dashboard.wait(20)
    data = dashboard.snapshot()
    assert set(data) == {VEGA_MIME, "image/svg+xml", "text/plain"}
    losses = next(
        rows for name, rows in data[VEGA_MIME]["datasets"].items() if name.endswith("_loss")
    )
    assert len(losses) == 13  # twelve steps and one evaluation
    assert "Finished: 12 steps" in data["text/plain"]


def test_stop_asks_the_run_and_shows_in_the_banner(folder: Path) -> None:
    play(folder, steps=400)
    dashboard = watch(Run(folder), [])
    deadline = time.monotonic() + 20
    while dashboard.progress.steps_done < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    dashboard.board._receive(dashboard.board, {"type": "press", "action": "stop"}, [])
    assert dashboard.wait(20)
    assert (
        dashboard.board.banner["headline"].startswith("Stopped after step ")
        and dashboard.progress.steps_done < 400
    )


def test_a_second_view_attached_later_sees_everything(folder: Path) -> None:
    play(folder).join(20)
    late = Dashboard(Run(folder)).start()
    assert late.wait(20) and late.progress.steps_done == 12
    assert len([row for row in late.board.rows("loss") if row["text"] == "training"]) == 12


def test_a_failure_is_shown_with_its_first_cause(folder: Path) -> None:
    fake_run.hello(folder, 2)
    fake_run.fail(folder)
    dashboard = watch(Run(folder), [])
    assert dashboard.wait(20)
    banner = dashboard.board.banner
    assert (
        banner["headline"] == "Failed: rank 1 was killed by SIGKILL in step 3"
        and banner["tone"] == "bad"
    )
    assert (
        "Watch the machine's free memory." in banner["lines"]
        and banner["code"] == "last line of rank 1"
    )
    assert "SIGKILL" in dashboard.snapshot()["text/plain"]


def test_ranks_that_are_up_are_counted(folder: Path) -> None:
    fake_run.put_state(folder, first_state(2, 12))
    dashboard = Dashboard(Run(folder))
    dashboard._poll()
    assert dashboard.board.banner["headline"] == "Starting: 0 of 2 ranks are up"
    fake_run.hello(folder, 2)
    dashboard._poll()
    assert dashboard.board.banner["headline"] == "Training · step 0 of 12"
    fake_run.step(folder, 2, 0)
    dashboard._poll()
    assert dashboard.board.banner["fraction"] == pytest.approx(1 / 12)


@pytest.mark.parametrize("phase", ["finished", "stopped", "running"])
def test_a_view_that_still_reads_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    fake_run.hello(folder, 2)
    for number in range(12):
        fake_run.step(folder, 2, number)
    fake_run.put_state(folder, first_state(2, 12), phase=phase, exit_code=0)
    monkeypatch.setattr(telemetry_reader, "LEAST_BYTES", 1_000)
    monkeypatch.setattr(telemetry_reader, "POLL_BYTES", 1_000)
    dashboard = Dashboard(Run(folder))
    headlines: list[str] = []
    done: list[int] = []
    while dashboard._reader.behind or not headlines:
        dashboard._poll()
        headlines.append(dashboard.board.banner["headline"])
        done.append(dashboard.progress.steps_done)
    assert len(headlines) > 3 and done[-1] == 12
    assert headlines[:-1] == [f"Reading {number} of 12 steps" for number in done[:-1]]
    assert headlines[-1].startswith("Training" if phase == "running" else phase.capitalize())
    assert dashboard.snapshot()["text/plain"].startswith(headlines[-1])


def test_a_view_of_a_finished_run_begins_by_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run.put_state(folder, first_state(2, 12), phase="finished", exit_code=0)
    monkeypatch.setattr(Dashboard, "_follow", lambda self: None)
    dashboard = Dashboard(Run(folder)).start()
    assert dashboard.board.banner["headline"] == "Reading 0 of 12 steps"


def test_a_run_has_one_step_time_wherever_it_is_shown(folder: Path) -> None:
    fake_run.hello(folder, 2)
    for number in range(12):
        fake_run.step(folder, 2, number, seconds=0.4 if number in (0, 1, 11) else 0.1)
    fake_run.put_state(folder, first_state(2, 12), phase="finished", exit_code=0)
    estimate = synthetic.profile("estimated", 2)
    dashboard = watch(Run(folder), [estimate])
    assert dashboard.wait(20)
    words = "step time 100 ms (median of 10 steps)"
    assert f" · {words} · " in "".join(dashboard.board.banner["lines"])
    (live,) = (f for f in dashboard.board.figures if f["name"] == "parts")
    profile = Run(folder).profile()
    still = step_time_parts(estimate, profile)
    for subtitle in (live["subtitle"], still.subtitle):
        assert subtitle.endswith(" · parts: median of 2 traced steps")
    assert words in still.subtitle
    (row,) = (r for r in compare(Run(folder)).to_json()["summary"] if r["source"] == "measured")
    assert row["step_seconds"] == profile.step_seconds == pytest.approx(0.1)
    assert row["tokens_per_second"] == dashboard.progress.tokens_per_second
