"""The shell's verbs on runs: real ranks through `accelerate launch`, from another shell too, and
out again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = [sys.executable, "-m", "workbench"]
PLAN = [
    "--model",
    "tiny",
    "--gpu",
    "local",
    "--gpus",
    "2",
    "--set",
    "training.sequence_length=64",
    "--set",
    "training.global_batch=4",
]
FOREVER = [*PLAN, "--set", "training.steps=100000"]

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Run one command line in a process of its own, runs kept in a folder of the test; the finished
    process.
    """
    environment = {**os.environ, "WORKBENCH_RUNS": str(tmp_path / "runs")}

    def ask(*words: object, code: int = 0) -> Any:
        done = subprocess.run(
            [*COMMAND, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    ask.environment = environment  # type: ignore[attr-defined]
    return ask


def left_over(folder: Path) -> list[Any]:
    """Processes of a run below `folder` that go on after its last state: none of its ranks may, and
    its supervisor, who wrote that state, ends within seconds.
    """
    found = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in p.info["cmdline"] or [])
    ]
    supervisors = [p for p in found if "workbench.runs.launch.supervisor" in p.info["cmdline"]]
    _, alive = psutil.wait_procs(supervisors, timeout=10)
    return [p for p in found if p not in supervisors] + alive


def until_it_trains(shell: Any, run: Any) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = json.loads(shell("attach", run, "--once", "--json").stdout)
        assert found["phase"] in ("starting", "running"), found
        if found["loss"]:
            return
        time.sleep(0.3)
    raise AssertionError("no step in a minute")


def test_run_to_its_end_then_compare(shell: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    shell("plan", *PLAN, "--strategy", "ddp", "--set", "training.steps=8", "-o", plan)
    done = shell("run", plan, "--wait", "--json")
    found = json.loads(done.stdout)
    assert (
        found["phase"] == "finished" and found["source"] == "measured" and found["world_size"] == 2
    )
    assert (
        len(found["loss"]) == 8 and found["loss"][-1] < found["loss"][0] and found["fits"] is True
    )
    assert (
        set(found["memory"]["peak_bytes_by_rank"]) == {"0", "1"} and found["tokens_per_second"] > 0
    )
    assert [row["run"] for row in json.loads(shell("runs", "--json").stdout)] == [found["run"]]
    page = tmp_path / "report.html"
    side = json.loads(shell("compare", found["run"], "--html", page, "--json").stdout)
    for row in side["memory"]:
        assert abs(row["rehearsed_error"]) < 0.02 and abs(row["estimated_error"]) < 0.05
        assert row["run"] == found["run"] and row["step"] is not None
    assert "<svg" in page.read_text() and "http-equiv" not in page.read_text()


def test_start_follow_from_elsewhere_and_stop(shell: Any, tmp_path: Path) -> None:
    started = json.loads(shell("run", *FOREVER, "--strategy", "dapple", "--json").stdout)
    until_it_trains(shell, started["run"])
    stopped = json.loads(shell("stop", started["run"], "--json").stdout)
    assert stopped["phase"] == "stopped" and not left_over(tmp_path)
    assert "stopped" in shell("attach", started["run_dir"]).stdout


def test_ctrl_c_stops_a_run_that_is_waited_for(shell: Any, tmp_path: Path) -> None:
    command = [*COMMAND, "run", *FOREVER, "--strategy", "megatron-tp", "--wait", "--json"]
    waiting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=shell.environment
    )
    try:
        deadline = time.monotonic() + 30
        while not json.loads(shell("runs", "--json").stdout) and time.monotonic() < deadline:
            time.sleep(0.3)
        until_it_trains(shell, json.loads(shell("runs", "--json").stdout)[0]["run"])
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
    assert waiting.returncode == 130 and "Traceback" not in err
    assert json.loads(out)["phase"] == "stopped" and not left_over(tmp_path)


def test_a_run_that_does_not_fit_is_refused_until_forced(shell: Any, tmp_path: Path) -> None:
    plan = ["--model", "llama-3-8b", "--gpu", "local", "--gpus", "2", "--strategy", "ddp"]
    estimate = json.loads(shell("estimate", *plan, "--json").stdout)
    assert estimate["fits"] is False
    done = shell("run", *plan, code=2)
    assert "does not fit" in done.stderr and "--force" in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_run_that_fails_says_why_and_exits_with_1(shell: Any, tmp_path: Path) -> None:
    corpus = tmp_path / "short.txt"
    corpus.write_text("long enough to train on it, too short to hold out a twentieth of it " * 2)
    words = ["--set", f"corpus={corpus}", "--set", "training.evaluation.every=1"]
    done = shell("run", *PLAN, "--strategy", "ddp", *words, "--wait", "--json", code=1)
    found = json.loads(done.stdout)
    assert found["phase"] == "failed" and found["cause"]["message"] and found["exit_code"] != 0
