"""`verify` on ranks of `accelerate launch`: CPU ranks here, by the path that GPU ranks take."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.machine import stub_nvml
from tests.parallel.small import plan
from workbench.engine.verify.rank_answer import ANSWERS, read_failure, write_failure
from workbench.errors import PlanError, Problem
from workbench.plan.schema import Plan
from workbench.runs.launch import subprocess_verbs

REPOSITORY = Path(__file__).parents[2]
VERIFY = """
import json, sys
from pathlib import Path
from workbench.engine.exit_codes import exit_status
from workbench.engine.verify.launched_ranks import verify_launched
from workbench.plan.schema import Plan
path, precision, seconds, module = sys.argv[1:]
answer = lambda: verify_launched(Plan.load(Path(path)), precision, float(seconds), module=module)
sys.exit(exit_status(lambda: print(json.dumps(answer()))))
"""


def launched(
    folder: Path,
    plan: Plan,
    precision: str = "fp32",
    module: str = "workbench.engine.verify.launched_rank",
    seconds: float = 100,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The launched verification, in a process of its own; afterwards none of it is alive."""
    path = folder / "plan.yaml"
    path.write_text(plan.to_yaml())
    command = [sys.executable, "-P", "-c", VERIFY, str(path), precision, str(seconds), module]
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder), **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    left = [p.pid for p in psutil.process_iter() if str(folder) in " ".join(_words(p))]
    assert not left
    return done


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.slow
def test_launched_ranks_equal_one_device(tmp_path: Path) -> None:
    done = launched(tmp_path, plan(2), "bf16")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["passed"] and answer["precision"] == "bf16"
    assert answer["tolerance"] == 0.125
    assert answer["replaced"]["training.optimizer.name"] == {"plan": "adamw", "verified": "sgd"}


@pytest.mark.slow
def test_a_wrong_gradient_on_one_rank_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, plan(data=2), module="tests.engine.wrong_rank")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["passed"]
    worst = answer["worst"]
    assert (worst["kind"], worst["rank"]) == ("gradients", 1)
    assert worst["tensor"] == "blocks.1.mlp.down.weight"
    assert worst["relative"] == pytest.approx(1.0, rel=1e-3)
    assert (answer["precision"], answer["tolerance"]) == ("fp32", 1e-4)


@pytest.mark.slow
def test_a_rank_that_dies_is_missed(tmp_path: Path) -> None:
    fault = {"WRONG_RANK": "fail"}
    done = launched(tmp_path, plan(data=2), module="tests.engine.wrong_rank", **fault)
    assert done.returncode == 1
    assert "ranks [0, 1] of 2 gave no answer" in done.stderr
    assert re.search(r"exitcode *: 3 .*pid", done.stderr), done.stderr


def test_the_first_failure_is_blamed(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).mkdir()
    assert read_failure(tmp_path) is None
    write_failure(tmp_path, 1, PlanError(Problem("cluster.gpu", "is another")), "first")
    write_failure(tmp_path, 0, RuntimeError(), "connection closed by peer")
    first = read_failure(tmp_path)
    assert first is not None and (first.rank, first.message) == (1, "first")
    assert first.refused == [Problem("cluster.gpu", "is another")]


def test_no_cpu_rank_stands_in_for_a_gpu() -> None:
    with pytest.raises(PlanError, match=r"--on: is gpu, and no GPU can be used here .*legal: cpu"):
        subprocess_verbs.verify(plan(2), on="gpu")


def test_the_plans_gpus_must_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_nvml.install(monkeypatch, stub_nvml.gpus(2, stub_nvml.A100))
    monkeypatch.setattr("workbench.machine.attached._torch_cuda", lambda: ("torch 2.13", "13.0"))
    for gpu, words in (
        (
            "ascend-910b",
            r"--on: is gpu, but cluster\.gpu is ascend-910b, whose ranks are npu ranks",
        ),
        ("h100-sxm-80gb", r"cluster\.gpu: is h100-sxm-80gb, another model than is attached"),
    ):
        with pytest.raises(PlanError, match=words):
            subprocess_verbs.verify(plan(2).replace(**{"cluster.gpu": gpu}), on="gpu")


@pytest.mark.parametrize(
    ("precision", "on", "words"),
    [
        ("fp64", "gpu", r"--precision: is 'fp64' with --on gpu; legal: fp32, bf16"),
        ("bf16", "cpu", r"--precision: is 'bf16'; legal: fp64, fp32, bf16 with --on gpu"),
        ("fp8", "cpu", r"--precision: is 'fp8'; legal: .* fp8 with strategy.precision fp8"),
        ("fp32", "cards", r"--on: is 'cards'; legal: cpu, gpu"),
    ],
)
def test_refusals_say_what_is_legal(precision: Any, on: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        subprocess_verbs.verify(plan(2), precision, on=on)
