"""Numerical equivalence on the attached GPUs: `verify` on ranks of `accelerate launch`.

The launch is that of a run: same command, environment, rendezvous, process group. Each rank trains
on one device by itself too, on its own, and compares its slices with that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from workbench.engine.exit_codes import exit_status
from workbench.engine.python_model.mixed_sequences import explained
from workbench.engine.verify.equivalence import GPU_TOLERANCE, in_precision, replaced_fields
from workbench.engine.verify.forked_ranks import RankError
from workbench.engine.verify.rank_answer import ANSWERS, PRECISION, read_answers, read_failure
from workbench.engine.verify.tensor_difference import TensorDifference, check_cover, summarize
from workbench.errors import PlanError
from workbench.interop import export
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch.accelerate_command import Recipe, compose
from workbench.runs.launch.parent_death import adopt_orphans, python_module
from workbench.runs.launch.process_tree import end_descendants
from workbench.runs.launch.rendezvous_ports import free_port
from workbench.safe_io import yaml_files

RANK = "workbench.engine.verify.launched_rank"
"""Module of a rank."""
POLL_SECONDS = 0.1
LEAVE_SECONDS = 10.0
"""How long a launcher may take to end after the last rank has answered, or the first has failed."""
LAST_CHARACTERS = 4000


def verify_launched(
    plan: Plan,
    precision: Literal["fp32", "bf16", "fp8"] = "fp32",
    seconds: float = 600.0,
    allow_code: bool = False,
    module: str = RANK,
) -> dict[str, Any]:
    """Compare a plan with one device, on ranks that `accelerate launch` starts.

    GPU ranks where the plan's device is a GPU, over NCCL; else CPU ranks over gloo. Processes that
    this one has are ended with the ranks.

    Args:
        plan: The plan.
        precision: Of both sides. In fp32 no product is computed in TF32; in bf16 gradients and
            optimizer state are fp32. Both replace AdamW by SGD.
        seconds: When ranks that have not answered are ended.
        allow_code: Run a model that is given as Python.
        module: What a rank runs, another one for planted faults.

    Returns:
        The answer of `equivalence.verify`; `tolerance` is that of `GPU_TOLERANCE`.

    Raises:
        PlanError: The engine cannot run the plan, its module mixes sequences, or a rank's GPU is
            not the plan's.
        RankError: A rank failed, or did not answer in time.
        ValueError: The ranks' slices do not cover a tensor exactly once.
    """
    written = plan.resolve()
    full = in_precision(written, precision, allow_code, on_plans_device=True).pin()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "launched")
        _write(folder, full, precision)
        command = compose(full, folder, free_port(), Recipe(module), allow_code)
        (folder / "accelerate.yaml").write_text(
            yaml_files.dump(export.accelerate_config(full, int(command.env[export.PORT])))
        )
        environment = {k: v for k, v in os.environ.items() if k not in command.unset}
        _launch(command.argv, environment | command.env, folder, full.world_size, seconds)
        answers = read_answers(folder, full.world_size)
    check_cover(answers[0]["numel"], [answer["owned"] for answer in answers])
    found = [TensorDifference(**each) for answer in answers for each in answer["differences"]]
    replaced = replaced_fields(written, full, precision, full.gpu.device == "cuda")
    return explained(summarize(found, precision, GPU_TOLERANCE[precision], replaced), full)


def _write(folder: Path, plan: ResolvedPlan, precision: str) -> None:
    """What a rank reads, and the folders it and the launcher write into."""
    for each in (folder / ANSWERS, folder / "logs"):
        each.mkdir(parents=True)
    (folder / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
    (folder / PRECISION).write_text(precision)


def _launch(
    argv: list[str], environment: dict[str, str], folder: Path, world_size: int, seconds: float
) -> None:
    """Start the launcher and wait until every rank has answered; no process is left behind.

    Raises:
        PlanError, RankError: A rank failed, or some did not answer.
    """
    adopt_orphans()
    shim = [*python_module("workbench.runs.launch.parent_death"), str(os.getpid()), *argv]
    with (folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            shim,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(launcher, folder, time.monotonic() + seconds)
    finally:
        end_descendants()
        launcher.wait()
    _raise_failure(folder, world_size, launcher.returncode, seconds)


def _await(launcher: subprocess.Popen[bytes], folder: Path, deadline: float) -> None:
    """Wait for the launcher's end; once a rank has failed, only a moment more."""
    failed = False
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if not failed and read_failure(folder) is not None:
            failed, deadline = True, min(deadline, time.monotonic() + LEAVE_SECONDS)


def _raise_failure(folder: Path, world_size: int, code: int, seconds: float) -> None:
    if (failure := read_failure(folder)) is not None:
        if failure.refused:
            raise PlanError(failure.refused)
        raise RankError(f"rank {failure.rank} failed:\n{failure.message}")
    answered = {int(path.stem) for path in (folder / ANSWERS).glob("*.json")}
    if silent := sorted(set(range(world_size)) - answered):
        last = (folder / "launcher.log").read_text(errors="replace")[-LAST_CHARACTERS:]
        ended = "were ended" if code < 0 else f"ended with the launcher's exit code {code}"
        raise RankError(
            f"ranks {silent} of {world_size} gave no answer within {seconds:g} s, and {ended}; "
            f"the launcher's last lines:\n{last}"
        )


def main() -> int:
    """`python -m workbench.engine.verify.launched_ranks PLAN [--precision fp32]` prints one JSON
    document; 1: failed, 2: refused.
    """
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.verify.launched_ranks")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--precision", choices=sorted(GPU_TOLERANCE), default="fp32")
    parser.add_argument("--allow-code", action="store_true")
    given = parser.parse_args()
    return exit_status(
        lambda: print(
            json.dumps(
                verify_launched(Plan.load(given.plan), given.precision, allow_code=given.allow_code)
            )
        )
    )


if __name__ == "__main__":
    sys.exit(main())
