"""The whole of `make gpu-check`, dry: every part runs, and most of it is evaluated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.check import LEAST_SHARE, PARTS, SEVERAL_GPUS

BUDGET = 900
NOT_ON_A_GPU_MACHINE = (
    "altair",
    "anywidget",
    "ipywidgets",
    "IPython",
    "jinja2",
    "jupyterlab",
    "nbclient",
    "tensorboard",
    "tree_sitter",
    "tree_sitter_bash",
    "vl_convert",
)
"""Of the project's dependencies: none has a part in training."""


@pytest.mark.slow
def test_parts_load_without_what_a_gpu_machine_lacks() -> None:
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({NOT_ON_A_GPU_MACHINE}))\n"
        f"for part in {(*PARTS, SEVERAL_GPUS)}: importlib.import_module(part)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr


@pytest.mark.slow
@pytest.mark.timeout(BUDGET + 60)
def test_a_dry_run_passes_and_evaluates_most_assertions(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    command = [sys.executable, "-m", "tests.gpu.check", "--dry", "--json", str(path)]
    answer = subprocess.run(
        [*command, "--budget", str(BUDGET)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    document = json.loads(path.read_text())
    counts = document["counts"]
    assert (counts["failed"], counts["not_reached"]) == (0, 0)
    assert counts["evaluated_share"] >= LEAST_SHARE
    assert {result["part"] for result in document["checks"]} == set(PARTS)
