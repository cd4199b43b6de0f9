"""One plan under all three instruments: what a notebook predicts, and what it then measures."""

from __future__ import annotations

from typing import NamedTuple

from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate
from workbench.profile import Profile
from workbench.runs.launch import checked_launch, subprocess_verbs
from workbench.runs.launch.traced_models import traced_model


class ThreeProfiles(NamedTuple):
    """What each instrument says of one plan."""

    estimated: Profile
    rehearsed: Profile
    measured: Profile


def all_three(plan: Plan, timeout: float = 300, allow_code: bool = False) -> ThreeProfiles:
    """Estimate a plan, rehearse it, and train it on this machine until it is done.

    Args:
        plan: A plan that is legal here; `telemetry: {memory_every: 1}` samples memory at each step.
        timeout: Seconds that the run may take.
        allow_code: Run a model that is given as Python.

    Raises:
        PlanError: The plan is illegal, or this machine cannot run it.
        RuntimeError: The run failed; the message gives the cause.
        TimeoutError: The run goes on after `timeout`.
    """
    traced = traced_model(plan, allow_code) if plan.code else None
    estimated = estimate(plan, traced)
    rehearsed = subprocess_verbs.rehearse(plan, allow_code=allow_code)
    run = checked_launch.start(plan, allow_code=allow_code)  # its estimate was asked already
    if run.wait(timeout).phase != "finished":
        raise RuntimeError(repr(run))
    return ThreeProfiles(estimated, rehearsed, run.profile())
