"""What needs torch, in a process apart: rehearsing a plan, and proving that it equals one device.

Shells, notebooks and widgets that ask for it load no torch and hold no CUDA context.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.errors import PlanError, refuse
from workbench.machine.attached import attached, host_memory
from workbench.machine.gpu_catalog import local_constants
from workbench.plan.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.launch import child_process
from workbench.runs.launch.kernel_compilers import missing

PROOF_COPIES = 8
"""Copies of the model that one device holds in 8-byte numbers: weights, gradients, moments, and
work space.
"""


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
) -> Profile:
    """Run the real code of `plan` on fake tensors, in a child process, at any world size.

    `ranks` to rehearse, default one a pipeline stage; `progress(done, of)` is told of each. Raises
    `PlanError` for a plan that is illegal or that this version cannot rehearse, `ChildError` if the
    rehearsal fails.
    """
    full = plan.resolve()
    require(full, "rehearse", allow_code)

    def line(text: str) -> None:
        if progress and text.startswith("{"):
            told = json.loads(text)
            progress(told["done"], told["of"])

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "profile")
        chosen = [] if ranks is None else ["--ranks", ",".join(map(str, ranks))]
        options = ["--to", str(out), *chosen, *_allowing(allow_code)]
        child_process.python("workbench.rehearsal", [_written(full, folder), *options], line)
        return Profile.read(out)


def verify(
    plan: Plan, precision: Literal["fp64", "fp32"] = "fp64", allow_code: bool = False
) -> dict[str, Any]:
    """Train a few steps with the same seed on one device and under `plan`, on CPU ranks, and
    compare every tensor.

    Returns the largest differences of loss, gradients and weights, the worst tensor, and `passed`.
    Raises `PlanError` for a plan that is illegal, that this version cannot run, or that is too
    large for the CPU ranks of this machine.
    """
    full = plan.resolve()
    require(full, "run", allow_code)
    _refuse_what_is_too_large(full)
    if found := missing(full.strategy.kernels, "cpu"):
        raise PlanError(found)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--precision", precision, *_allowing(allow_code)]
        child_process.python(
            "workbench.engine.verify.equivalence", [_written(full, folder), *options], said.append
        )
    return dict(json.loads(said[-1]))


def inspect(plan: Plan) -> None:
    """Build a complete plan's model, which is code that the user has allowed, and hold its
    operators against it.

    Raises ValueError with what stands against it.
    """
    with tempfile.TemporaryDirectory() as folder:
        child_process.python(
            "workbench.engine.check_python_model",
            [_written(plan, folder), *_allowing(True)],
            lambda line: None,
        )


def _allowing(allow_code: bool) -> list[str]:
    return ["--allow-code"] if allow_code else []


def _written(plan: Plan, folder: str) -> str:
    path = Path(folder, "plan.yaml")
    path.write_text(plan.to_yaml(), encoding="utf-8")
    return str(path)


def _refuse_what_is_too_large(plan: ResolvedPlan) -> None:
    """A proof forks every rank on this machine and holds whole copies of the model."""
    most = attached().cores * int(local_constants()["ranks_per_core"])
    if plan.world_size > most:
        raise refuse(
            "cluster.gpus",
            f"is {plan.world_size}; a proof runs on CPU ranks, of which this machine starts "
            f"up to {most}; legal: 1 to {most}, with the same strategy",
        )
    if plan.code:  # how large it is only building it tells
        return
    replicas = plan.sizes["data"] * plan.sizes["context"]
    need, have = 8 * PROOF_COPIES * (1 + replicas) * parameters(plan.shape).total, host_memory()
    if need > have:
        raise refuse(
            "model",
            f"a proof of {plan.shape.name} holds about {need / 2**30:.1f} GiB, this machine has "
            f"{have / 2**30:.1f} GiB; legal: a smaller model with the same strategy, e.g. tiny",
        )
