"""What lies in the current folder under the name of a package does not run in its place, unless
code is allowed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.conftest import REPOSITORY
from workbench.plan.schema import Plan
from workbench.runs import start
from workbench.runs.launch import child_process

PLANTED = "import pathlib; (pathlib.Path(__file__).parent / ('ran-' + __name__)).touch()\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that holds files under the names of packages; each leaves a trace if
    anything imports it.
    """
    folder = tmp_path / "beside"
    folder.mkdir()
    for name in ("orjson", "accelerate", "torch", "yaml", "psutil"):
        (folder / f"{name}.py").write_text(PLANTED)
    monkeypatch.chdir(folder)
    yield folder
    assert not list(folder.glob("ran-*"))


@pytest.mark.slow
def test_a_run_imports_nothing_from_the_current_folder(planted: Path, plan: Plan) -> None:
    run = start(plan.replace(**{"training.steps": 1, "cluster.gpus": 2}), root=planted / "runs")
    assert run.wait(90).phase == "finished", run.state.cause


def test_a_child_imports_nothing_from_the_current_folder(planted: Path) -> None:
    child_process.python(
        "workbench.engine.python_model.check_python_model", ["--help"], lambda line: None
    )


def test_the_command_imports_nothing_from_the_current_folder(planted: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "workbench", "plan", "--model", "tiny", "--gpu", "local"], timeout=60
    )
    assert told.returncode == 0


def test_a_model_that_is_code_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_beside_a_plan.py").write_text(
        "import torch\nbuild = lambda: torch.nn.Linear(2, 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    code = (
        "from workbench.models.python_model import build_python_model as b; from "
        "workbench.plan.schema import PythonModel as P\n"
    )
    code += "b(P(python='models_beside_a_plan:build', vocab=2), 0)"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
