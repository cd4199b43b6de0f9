"""Every system of the workbench, small, through all instruments: `docs/systems.md`'s table.

`python -m tests.benchmarks.systems_table [NAME ...]` estimates, rehearses, runs (by `accelerate
launch`, real ranks on CPU) and verifies each system on a model of a few layers, and prints a table
in Markdown. What is done goes to `build/systems.jsonl`, a line a system, from which a stopped table
resumes. Nothing is timed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.systems import SYSTEMS, System
from tests.parallel.operator_strategies import columns_before_rows
from workbench.engine.verify.equivalence import verify
from workbench.errors import ChildError, PlanError
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.estimate import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.launch import checked_launch
from workbench.units import bytes_text

DONE = Path("build/systems.jsonl")
HEAD = "| system | paper | plan | ranks | estimate | rehearsal | run | verify | notebook |"
SECONDS = 600.0
"""A run of a few steps on a busy machine."""
MODEL = {
    **{"name": "small", "layers": 8, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128},
    **{"vocab": 512, "max_positions": 64},
}
MOE = {"experts": 4, "top_k": 2, "ffn": 64}


def plan_of(system: System) -> Plan:
    """The small plan of a system."""
    model = {**MODEL, **({"moe": MOE} if system.experts else {})}
    written = {
        "model": system.module or model,
        "cluster": {"gpu": "local", "gpus": system.ranks},
        "strategy": {"preset": system.preset},
        "training": {"sequence_length": 64, "global_batch": 8, "micro_batch": 1, "steps": 3},
        "telemetry": {"memory_every": 1},
    }
    plan = Plan.model_validate(written).replace(**system.changes)
    if system.splits_operators:
        operators = columns_before_rows(plan.resolve().shape, system.ranks)
        plan = plan.replace(**{"strategy.operators": operators})
    return plan


def cells(system: System) -> dict[str, str]:
    """Column -> what the instrument says, or why it does not."""
    found: dict[str, Profile] = {}
    plan, allow = plan_of(system), system.module is not None

    def peak(name: str, make: Callable[[], Profile], than: str = "") -> str:
        found[name] = make()
        size = counted_by_all(found[name], plan)
        if than not in found:
            return bytes_text(size)
        return f"{size / counted_by_all(found[than], plan) - 1:+.1%}"

    columns: dict[str, Callable[[], str]] = {
        "estimate": lambda: peak("estimate", lambda: estimated(plan, allow)),
        "rehearsal": lambda: peak(
            "rehearsal", lambda: rehearse(plan, allow_code=allow), "estimate"
        ),
        "run": lambda: peak("run", lambda: measured(plan, allow), "rehearsal"),
        "verify": lambda: verified(plan, allow),
    }
    return {name: _answer(ask) for name, ask in columns.items()}


def counted_by_all(profile: Profile, plan: Plan) -> float:
    """Bytes allocated at the peak; of a GPU's estimate without workspaces, which none rehearses."""
    most = max(profile.peak_allocated_by_rank.values())
    if profile.source != "estimated" or not profile.capacity_bytes:
        return most
    return most - with_calibration(plan.resolve())[1].workspace_mib * 2**20


def estimated(plan: Plan, allow_code: bool) -> Profile:
    """The estimate; of a module of one's own in a child process, which traces it."""
    if not allow_code:
        return estimate(plan)
    from workbench import verbs

    return verbs.estimate(plan, allow_code=True)


def measured(plan: Plan, allow_code: bool) -> Profile:
    """What real ranks measure. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory() as root:
        run = checked_launch.run(plan, root=root, allow_code=allow_code)
        if run.wait(SECONDS).phase != "finished":
            raise RuntimeError(repr(run).splitlines()[0])
        return run.profile()


def verified(plan: Plan, allow_code: bool) -> str:
    """The largest relative difference from one device in fp64; of fp8 from one device in fp8."""
    precision = "fp8" if plan.resolve().strategy.precision == "fp8" else "fp64"
    answer = verify(plan, precision, allow_code=allow_code)
    worst = max(answer["max_relative_diff"].values())
    return f"{worst:.0e}" if answer["passed"] else f"FAILS, {answer['worst']['tensor']}"


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except PlanError as error:
        return f"refused: {error.problems[0].field}"
    except (ChildError, RuntimeError, TimeoutError) as error:
        return f"FAILS: {str(error).splitlines()[0][:60]}"


def line(system: System, answers: dict[str, str]) -> str:
    """A row of the table."""
    papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in system.papers)
    books = ", ".join(f"[{name[:2]}](../notebooks/{name}.ipynb)" for name in system.notebooks)
    row = [system.name, papers, system.written, str(system.ranks), *answers.values(), books]
    return f"| {' | '.join(row)} |"


def main(names: list[str]) -> None:
    """Fill the table, and print it."""
    DONE.parent.mkdir(exist_ok=True)
    lines = DONE.read_text().splitlines() if DONE.exists() else []
    done: dict[str, Any] = dict(map(json.loads, lines))
    for system in SYSTEMS:
        if system.name not in done and (not names or system.name in names):
            done[system.name] = cells(system)
            with DONE.open("a") as file:
                file.write(json.dumps([system.name, done[system.name]]) + "\n")
            print(line(system, done[system.name]), file=sys.stderr, flush=True)
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for system in SYSTEMS:
        if system.name in done:
            print(line(system, done[system.name]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main(sys.argv[1:])
