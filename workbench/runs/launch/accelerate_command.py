"""The one command that a run is: `accelerate launch` with the worker and the plan, and the
environment it needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from workbench.interop import export
from workbench.interop.launch_environment import (
    FORMER_NAMES,
    allocator_environment,
    environment,
    of_another_launch,
    users_own,
)
from workbench.machine.attached import attached
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch.parent_death import python_module
from workbench.runs.store.command_file import RunCommand
from workbench.runtime_facts.phase_deadlines import SLOW_FACTOR


@dataclass(frozen=True)
class Recipe:
    """What is launched and how patiently it is watched; users never change it, fault tests do."""

    module: str = "workbench.engine.worker"
    launcher: tuple[str, ...] = ()
    """Command before the module and the plan; empty: `accelerate launch`."""
    hello_seconds: float | None = None
    """Longest time without work until each rank's first record; None: from the plan's timeout and
    world size.
    """
    progress_seconds: float | None = None
    """Longest silence of a rank that is not working; None: the plan's timeout."""


def compose(
    plan: ResolvedPlan, folder: Path, port: int, recipe: Recipe, allow_code: bool = False
) -> RunCommand:
    """The command of a complete `plan` whose run directory is (or will be) `folder`; ranks run a
    Python model only with `allow_code`.
    """
    module = [
        "-m",
        recipe.module,
        str(folder / "plan.yaml"),
        *(["--allow-code"] if allow_code else []),
    ]
    timeout = float(plan.telemetry.timeout_seconds)
    hello_seconds = recipe.hello_seconds or max(60.0, timeout) + 5.0 * plan.world_size
    meeting = {export.PORT: str(port), export.START_DEADLINE: f"{SLOW_FACTOR * hello_seconds:g}"}
    return RunCommand(
        argv=[*(recipe.launcher or accelerate_launch(plan, folder)), *module],
        env=launch_environment(plan) | meeting,
        unset=of_another_launch(os.environ),
        cwd=os.getcwd(),
        world_size=plan.world_size,
        steps=plan.training.steps,
        hello_seconds=hello_seconds,
        progress_seconds=recipe.progress_seconds or timeout,
    )


def accelerate_launch(plan: Plan, folder: Path) -> list[str]:
    """`accelerate launch` for the run in `folder`; each rank's streams also go to `logs/`."""
    config = str(folder / "accelerate.yaml")
    logs = ["--tee", "3", "--log_dir", str(folder / "logs")]
    launch = [*python_module("accelerate.commands.launch"), "--config_file", config]
    return [*launch, "--main_process_port", "0", *export.rendezvous(plan), *logs]


def launch_environment(plan: ResolvedPlan) -> dict[str, str]:
    """Variables that ranks need, and those of the user's own that go before ours; none of them
    steers a number.

    Ranks that wait must not spin while others compute on the same cores: hence the passive waiting.
    """
    found = {
        name: value
        for name, value in environment(plan, cores=attached().cores).items()
        if FORMER_NAMES.get(name, "") not in os.environ
    }
    if plan.gpu.device == "cuda":
        found |= allocator_environment(version("torch"), os.environ)
    return found | users_own(plan, os.environ)
