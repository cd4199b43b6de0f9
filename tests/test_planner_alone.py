"""The planner works where torch and JupyterLab are not installed: a laptop that only plans."""

import json
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parent.parent
NEEDED = (
    "pydantic",
    "pyyaml",
    "numpy",
    "scipy",
    "pandas",
    "psutil",
    "orjson",
    "typer",
    "rich",
    "tree-sitter",
    "tree-sitter-bash",
    "nvidia-ml-py",
)
ABSENT = ("torch", "accelerate", "jupyterlab", "ipywidgets", "anywidget", "altair", "triton")
PLAN = ["--model", "llama-3-8b", "--gpu", "h100-sxm-80gb", "--gpus", "64", "--strategy", "zero-3"]


def closure(names: tuple[str, ...]) -> set[str]:
    """Installed distributions that `names` need, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another platform or Python
        if name.lower() in found:
            continue
        found.add(name.lower())
        asked = map(Requirement, needs)
        waiting += [r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment that holds what the planner needs and no more."""
    home = tmp_path_factory.mktemp("planner")
    venv.create(home, with_pip=False)
    packages = next(home.glob("lib/python*/site-packages"))
    for name in closure(NEEDED):
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or [] if file.parts[0] != ".."}:
            target = Path(str(one.locate_file(top)))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
    (packages / "workbench.pth").write_text(f"{REPOSITORY}\n")
    return home / "bin" / "python"


def run(python: Path, *words: str) -> str:
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ABSENT)
def test_it_is_absent(python: Path, name: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is not None)"
    run(python, "-c", code)


def test_a_plan_is_estimated(python: Path) -> None:
    answer = json.loads(run(python, "-m", "workbench", "estimate", *PLAN, "--json"))
    here = json.loads(run(Path(sys.executable), "-m", "workbench", "estimate", *PLAN, "--json"))
    assert answer == here and answer["fits"] is True


def test_strategies_are_searched_and_explained(python: Path) -> None:
    found = json.loads(run(python, "-m", "workbench", "search", *PLAN[:-2], "--top", "1", "--json"))
    assert len(found["top"]) == 1
    assert "step" in run(python, "-m", "workbench", "explain", *PLAN)
