"""The shell's verbs on plans: JSON for machines, errors in a line, exit codes, files whole or
absent.
"""

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import Ask
from workbench.cli import app
from workbench.cli.commands import doctor

LOCAL = ["--model", "tiny", "--gpu", "local", "--gpus", "1", "--strategy", "single"]
TINY = ["--model", "tiny", "--gpu", "h100-sxm-80gb", "--gpus", "4"]


def test_importing_the_command_loads_no_torch() -> None:
    program = "import sys, workbench.cli, workbench.verbs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_strategies_list_the_four_keys_that_scripts_rely_on(ask: Ask) -> None:
    code, out, _ = ask("strategies", "--json")
    rows = json.loads(out)
    assert code == 0 and all(set(row) == {"name", "title", "source", "runnable"} for row in rows)
    can = {row["name"]: row["runnable"] for row in rows}
    assert (
        can["ddp"]
        and can["dapple"]
        and can["megatron-tp"]
        and can["tensor-pipeline"]
        and can["zero-3"]
    )


@pytest.mark.parametrize(
    "words, field, option",
    [
        (["--set", "model=tiny-gpt"], "model", "--model"),
        (["--set", "cluster={gpus: 2}"], "cluster", "--gpu and --gpus"),
        (["--strategy", "ddp", "--set", "strategy={}"], "strategy", "--strategy"),
    ],
)
def test_a_field_given_whole_twice_is_refused_by_both_names(
    ask: Ask, words: list[str], field: str, option: str
) -> None:
    code, _, err = ask("estimate", *TINY, *words)
    assert code == 2 and f"--set: {field}=... gives all of `{field}`, and so does {option}" in err


@pytest.mark.parametrize("field", ["self", "changes", "plan"])
def test_a_field_that_no_plan_has_is_an_unknown_key_whatever_it_is_called(
    ask: Ask, field: str
) -> None:
    code, _, err = ask("estimate", *TINY, "--set", f"{field}=1")
    assert code == 2 and f"{field}: unknown key; legal: version" in err


def test_a_search_takes_its_strategy_as_a_field(ask: Ask) -> None:
    code, _, err = ask("search", *TINY, "--top", "1", "--set", "strategy={precision: fp16}")
    assert (code, err) == (0, "")


def test_a_search_refuses_a_strategy_and_says_how_to_keep_one(ask: Ask) -> None:
    code, _, err = ask("search", *TINY, "--strategy", "zero-3")
    assert code == 2 and "--strategy: is 'zero-3'" in err and "--where strategy.data.zero=3" in err


def test_a_search_of_unequal_stages_shows_other_planners(ask: Ask) -> None:
    words = ["search", *TINY, "--top", "1", "--space", "unequal"]
    code, out, _ = ask(*words)
    assert code == 0 and "latency model" in out and "PipeDream's planner" in out
    code, out, _ = ask(*words, "--json")
    found = json.loads(out)
    assert code == 0 and found["top"][0]["stages"]["speed_up"] > 0
    assert [one["source"] for one in found["baselines"]] == ["estimated"] * 5


def _broken() -> None:
    raise RuntimeError("no\x1b[2J\nsecond line")


@pytest.mark.parametrize("shown", [False, True])
def test_an_internal_error_is_one_sentence_that_says_where_its_traceback_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, shown: bool
) -> None:
    monkeypatch.setattr(app, "answer", lambda words: _broken())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WORKBENCH_TRACEBACK", "1" if shown else "")
    with pytest.raises(SystemExit) as end:
        app.main(["plan", "--json"])
    out, err = capsys.readouterr()
    files = list(tmp_path.iterdir())
    assert end.value.code == 1 and json.loads(out)["error"].startswith(
        "internal error: RuntimeError: no"
    )
    assert (
        "internal error: RuntimeError: no[2J (please report it; " in err
        and "second line (" not in err
    )
    assert ("Traceback" in err) == shown and bool(files) != shown
    assert all(str(file) in err and "second line" in file.read_text() for file in files)


@pytest.mark.parametrize(
    "verb, name", [("models", "llama-3-8b"), ("gpus", "ascend-910"), ("gpus", "local")]
)
def test_catalog_lists(ask: Ask, verb: str, name: str) -> None:
    code, out, _ = ask(verb, "--json")
    assert code == 0 and name in [row["name"] for row in json.loads(out)]
    assert name in ask(verb)[1]


def test_plan_writes_a_file_that_reads_back(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, out, _ = ask(
        "plan",
        *TINY,
        "--strategy",
        "dapple",
        "--set",
        "training.optimizer.learning_rate=3e-4",
        "-o",
        path,
        "--json",
    )
    assert code == 0 and json.loads(out)["sizes"]["pipeline"] == 4
    assert yaml.safe_load(path.read_text())["training"]["optimizer"]["learning_rate"] == 3e-4
    code, out, _ = ask("plan", path, "--json")
    assert code == 0 and json.loads(out)["plan"]["strategy"]["preset"] == "dapple"


def test_a_strategy_given_beside_a_file_is_not_held_back_by_the_file(
    ask: Ask, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    ask("plan", *TINY, "--strategy", "dapple", "--complete", "-o", path)
    code, out, _ = ask("plan", path, "--strategy", "megatron-tp", "--json")
    assert code == 0 and json.loads(out)["sizes"] == {
        "tensor": 4,
        "context": 1,
        "data": 1,
        "pipeline": 1,
    }
    code, out, _ = ask(
        "plan", path, "--gpu", "a100-sxm-80gb", "--gpus", "2", "--strategy", "ddp", "--json"
    )
    full = json.loads(out)["plan"]
    assert full["cluster"]["fabric"]["name"] == "dgx-a100" and full["cluster"]["gpus_per_node"] == 2


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        (("--gpus", "96"), "256 → 384"),
        (("--set", "cluster.gpus=128"), "256 → 512"),
        (("--set", "training.micro_batch=3"), "256 → 768"),
        (("--gpus", "32"), None),
        (("--set", "training.micro_batch=2"), None),
        (("--gpus", "128", "--set", "training.global_batch=256"), None),
    ],
)
def test_a_batch_that_follows_the_options_is_said(
    ask: Ask, tmp_path: Path, words: tuple[str, ...], batches: str | None
) -> None:
    file = tmp_path / "plan.yaml"
    written = ("--model", "llama-3-8b", "--gpu", "h100-sxm-80gb", "--gpus", "64")
    assert ask("plan", *written, "--strategy", "zero-3", "-o", file)[0] == 0
    code, out, said = ask("estimate", file, *words, "--json")
    before = json.loads(ask("plan", file, "--json")[1])["plan"]["training"]["global_batch"]
    after = json.loads(ask("plan", file, *words, "--json")[1])["plan"]["training"]["global_batch"]
    assert code == 0 and json.loads(out) and (f"{before} → {after}" in said) == (before != after)
    assert batches is None or f"global_batch follows the options: {batches}," in said


def test_differences_between_two_plans(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    ask("plan", *TINY, "-o", path, "--strategy", "ddp")
    code, out, _ = ask("plan", path, "--set", "training.steps=7", "--diff", path, "--json")
    assert code == 0 and json.loads(out)["diff"] == [
        {"field": "training.steps", "other": 100, "this": 7}
    ]


@pytest.mark.parametrize(
    "words, says",
    [
        (["estimate"], "give a plan file, or --model"),
        (["plan", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["plan", *TINY, "--strategy", "dappel"], "did you mean dapple"),
        (["plan", *TINY, "--set", "training.step=3"], "did you mean steps"),
        (["plan", *TINY, "--set", "steps"], "key=value"),
        (
            ["plan", *TINY, "--strategy", "ddp", "--set", "strategy.tensor.size=8"],
            "legal for tiny: 1 to 4",
        ),
        (
            ["plan", "--model", "tiny", "--gpu", "local", "--gpus", "4096", "--strategy", "ddp"],
            "are attached here",
        ),
        (
            ["run", *TINY, "--set", "strategy.stack=deepspeed-3d"],
            "strategy.stack: is 'deepspeed-3d'; this version can run",
        ),
        (
            ["rehearse", *TINY, "--set", "strategy.stack=deepspeed-3d"],
            "this version can rehearse 'workbench'",
        ),
        (["rehearse", *TINY, "--strategy", "ddp", "--ranks", "0,9"], "legal: 0 to 3"),
        (["rehearse", *TINY, "--strategy", "ddp", "--ranks", "all"], "numbers with commas"),
        (["verify", *TINY, "--strategy", "ddp", "--precision", "fp8"], "legal: fp64, fp32"),
        (
            [
                "verify",
                "--model",
                "gpt3-175b",
                "--gpu",
                "a100-sxm-80gb",
                "--gpus",
                "4",
                "--strategy",
                "dapple",
            ],
            "a smaller model",
        ),
        (["verify", *TINY[:-1], "4096", "--strategy", "ddp"], "verify runs on CPU ranks"),
        (["attach", "no-such-run"], "is no run directory"),
        (["stop", "no-such-run"], "is no run directory"),
        (["run", *LOCAL, "--resume", "no-such-run"], "is no run directory"),
        (["run", *LOCAL, "--resume", "/"], "legal: a run directory, or one of its checkpoints"),
        (["run", *LOCAL, "--set", "checkpoint.load=nowhere"], "'nowhere' does not exist"),
        (["run", *LOCAL, "--set", "corpus=nowhere"], "'nowhere' does not exist"),
        (["run", *LOCAL, "--root", "/dev/null/runs"], "cannot be written"),
        (["run", *LOCAL, "--port", "99999"], "port"),
        (["compare", "plan.yml"], "cannot be read"),
        (["compare", "a.yaml", "--html", "/no/where.html"], "cannot be read"),
        (["compare", "no-such-run"], "is no run directory"),
    ],
)
def test_bad_input_is_said_in_words_with_exit_code_2(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    code, out, err = ask(*words)
    assert code == 2 and says in " ".join(err.split()) and out == "" and "Traceback" not in err
    code, out, err = ask(*words, "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 2 and told["error"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words", [["no-such-verb"], ["plan", "--gpus", "two"], ["plan", "--no-such-option"], ["stop"]]
)
def test_a_wrong_command_line_exits_with_2(ask: Ask, words: list[str]) -> None:
    code, _, err = ask(*words)
    assert code == 2 and "Traceback" not in err


def test_a_folder_that_cannot_be_written(ask: Ask, tmp_path: Path) -> None:
    code, _, err = ask("plan", *TINY, "--strategy", "ddp", "-o", tmp_path / "no" / "plan.yaml")
    assert code == 2 and "--output" in err
    code, _, err = ask("export", *TINY, "--strategy", "ddp", "--to", "/dev/null/x")
    assert code == 2 and "--to" in err


def test_export_writes_four_files(ask: Ask, tmp_path: Path) -> None:
    code, out, _ = ask("export", *TINY, "--strategy", "ddp", "--to", tmp_path / "out", "--json")
    assert code == 0 and len(json.loads(out)["files"]) == 4 == len(
        list((tmp_path / "out").iterdir())
    )


def test_doctor_answers_machines(ask: Ask) -> None:
    code, out, _ = ask("doctor", "--json")
    found = {row["what"]: row for row in json.loads(out)}
    assert code in (0, 1) and found["torch"]["ok"] and found["devices"]["ok"]
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    assert {re.split("[<>=]", word)[0] for word in declared} <= set(found)
    assert (
        "hypothesis" not in found and "wandb" not in found
    )  # of extras, which a run does not need


def test_doctor_reads_what_a_checkout_declares_and_else_what_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = [
        "torch>=2",
        "wandb; extra == 'trackers'",
    ]  # made before the checkout declared numpy
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: installed)
    monkeypatch.setattr(doctor, "SOURCE", tmp_path / "pyproject.toml")
    assert doctor.needed() == ["torch"]
    doctor.SOURCE.write_text(
        '[project]\nname = "workbench"\ndependencies = ["torch>=2", "numpy"]\n'
    )
    assert doctor.needed() == ["torch", "numpy"]


def test_no_runs(ask: Ask, tmp_path: Path) -> None:
    code, out, _ = ask("runs", "--root", tmp_path, "--json")
    assert code == 0 and json.loads(out) == []


@pytest.mark.parametrize("words", [["runs"], ["attach", "x"], ["run", *LOCAL]])
def test_a_file_is_no_folder_of_runs(ask: Ask, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = ask(*words, "--root", tmp_path / "file")
    assert (
        code == 2
        and out == ""
        and "--root" in err
        and "is a file" in " ".join(err.replace("│", " ").split())
    )
    code, out, _ = ask(*words, "--root", tmp_path / "file", "--json")
    assert code == 2 and "--root" in json.loads(out)["error"]


def test_rehearse_answers_with_the_keys_of_a_profile(ask: Ask) -> None:
    code, out, err = ask(
        "rehearse", *TINY, "--strategy", "dapple", "--set", "training.global_batch=4", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["source"] == "rehearsed" and found["world_size"] == 4 and found["fits"] is True
    assert (
        set(found["memory"]["peak_bytes_by_rank"]) == {"0", "1", "2", "3"}
        and found["step_seconds"] is None
    )
    assert found["memory"]["by_category"]["parameters"] > 0


def test_the_order_of_calls_is_checked_of_all_ranks(ask: Ask) -> None:
    code, out, err = ask("rehearse", *TINY, "--strategy", "ddp", "--check", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["problems"] == [] and found["traced"] == found["world_size"] == 4
    code, out, _ = ask("rehearse", *TINY, "--strategy", "ddp", "--check", "--ranks", "1", "--json")
    assert code == 2 and json.loads(out)["error"].startswith("--ranks: ")


def test_verify_passes_and_says_how_far(ask: Ask) -> None:
    code, out, err = ask(
        "verify",
        *TINY[:-1],
        "2",
        "--strategy",
        "dapple",
        "--set",
        "training.global_batch=4",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)
    assert (
        found["passed"]
        and set(found["max_abs_diff"]) == {"loss", "gradients", "weights"}
        and found["worst"]["tensor"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_verify_says_which_precision_replaced_the_plans(ask: Ask, precision: str) -> None:
    plan = [*TINY[:-1], "2", "--strategy", "ddp", "--set", "strategy.precision=bf16"]
    fields = ["strategy.precision", "training.optimizer.moments", "training.optimizer.name"]
    code, out, err = ask("verify", *plan, "--precision", precision, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["precision"] == precision
    assert found["replaced"]["strategy.precision"] == {"plan": "bf16", "verified": precision}
    asked = fields[:2] if precision == "fp64" else fields[::2]
    assert [field for field in fields if field in found["replaced"]] == asked
    code, out, err = ask("verify", *plan, "--precision", precision)
    text = " ".join(out.split())
    assert code == 0, err
    assert f"PASSED: verified in {precision}, tolerance" in text
    assert f"Verified in {precision}, not at the plan's own precision." in text
    assert f"strategy.precision bf16 → {precision}" in text


def test_estimate_says_what_would_fit(ask: Ask) -> None:
    plan = [
        "--model",
        "gpt-7.5b",
        "--gpu",
        "v100-sxm2-32gb",
        "--gpus",
        "64",
        "--strategy",
        "zero-1",
    ]
    code, out, _ = ask("estimate", *plan, "--json")
    found = json.loads(out)
    assert (
        code == 0
        and found["source"] == "estimated"
        and found["fits"] is False
        and found["step_seconds"] > 0
    )
    assert len(found["memory"]["peak_bytes_by_rank"]) == 64
    change = found["advice"]
    code, out, _ = ask("estimate", *plan, "--set", f"{change['field']}={change['to']}", "--json")
    assert code == 0 and json.loads(out)["fits"] is True
    code, out, _ = ask("estimate", *plan)
    assert code == 0 and "smallest change that fits" in out and "NO" in out


def test_ctrl_c_ends_a_rehearsal_and_its_child() -> None:
    command = [
        sys.executable,
        "-m",
        "workbench",
        "rehearse",
        "--model",
        "tiny",
        "--gpu",
        "h100-sxm-80gb",
    ]
    process = subprocess.Popen(
        [*command, "--gpus", "64", "--strategy", "megatron-3d"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[Any] = []
    deadline = time.monotonic() + 30
    while not children and time.monotonic() < deadline:
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert children and not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    "words", [("estimat",), ("estimate", "--gpus", "x"), ("estimate", "--bogus"), ("export",)]
)
def test_a_wrong_command_line_is_json_for_machines_too(ask: Ask, words: tuple[Any, ...]) -> None:
    code, out, err = ask(*words, "--json")
    assert code == 2 and json.loads(out)["exit_code"] == 2
    assert json.loads(out)["error"] in err.replace("Error: ", "")


def test_a_plan_that_cannot_be_written_leaves_no_draft(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    code, _, err = ask("plan", *TINY, "-o", folder)
    assert code == 2 and err.startswith("error: --output")
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())


@pytest.mark.parametrize("words", [("gpus",), ("gpus", "--json")])
def test_an_answer_that_cannot_be_printed_is_a_failure_in_one_line(words: tuple[Any, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "workbench", *words]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (
        done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr
    )


def test_ctrl_c_while_the_command_is_loaded_is_one_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from workbench.__main__ import "
        f"main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
