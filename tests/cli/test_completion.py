"""Shell completion, as bash, zsh and fish ask for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.runs.store.run_state import first_state, write_state

WORKBENCH = [sys.executable, "-m", "workbench"]
CATALOG = [
    (("workbench", "expl"), "explain"),
    (("workbench", "estimate", "--strat"), "--strategy"),
    (("workbench", "estimate", "--strategy", "megatron-"), "megatron-3d"),
    (("workbench", "run", "--model", "llama-3-"), "llama-3-8b"),
    (("workbench", "search", "plan.yaml", "--gpu", "loc"), "local"),
    (("workbench", "import", "x.json", "--gpu", "h100"), "h100-sxm-80gb"),
    (("workbench", "states", "llama-3-"), "llama-3-8b"),
    (("workbench", "states", "--gpu", "h100"), "h100-sxm-80gb"),
    (("workbench", "estimate", "pl"), "plan.yaml"),
    (("workbench", "compare", "plan.yaml", "sub/o"), "sub/other.yml"),
    (("workbench", "attach", "2026"), "20260101-000000-tiny"),
]


def asked(shell: str, words: tuple[str, ...], folder: Path) -> list[str]:
    line = " ".join(words)
    of_shell = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    env = {**os.environ, **of_shell[shell], "_WORKBENCH_COMPLETE": f"complete_{shell}"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(WORKBENCH, env=env, cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.replace('"', "\n").split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "20260101-000000-tiny"
    for place in (run, tmp_path / "sub"):
        place.mkdir(parents=True)
    write_state(run, first_state(2, 20))
    (tmp_path / "plan.yaml").touch()
    (tmp_path / "sub/other.yml").touch()
    return tmp_path


@pytest.mark.parametrize(("words", "one"), CATALOG, ids=lambda value: str(value))
def test_names_plan_files_and_runs_complete(words: tuple[str, ...], one: str, folder: Path) -> None:
    assert one in asked("bash", words, folder)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_too(shell: str, folder: Path) -> None:
    assert "zero-3" in asked(shell, ("workbench", "plan", "--strategy", "zero-"), folder)


def test_commands_are_listed_without_importing_one(folder: Path) -> None:
    assert {"estimate", "explain", "export"} <= set(asked("bash", ("workbench", "e"), folder))
    program = (
        "import sys; from workbench.cli.app import app; c = app.make_context('workbench', [], "
        "resilient_parsing=True); found = app.shell_complete(c, ''); assert len(found) > 20; "
        "sys.exit(any('workbench.cli.commands.' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    env = {**os.environ, "_WORKBENCH_COMPLETE": f"source_{shell}"}
    done = subprocess.run(WORKBENCH, env=env, capture_output=True, text=True, check=True)
    assert "workbench" in done.stdout and f"complete_{shell}" in done.stdout
